"""Processes that meet to work together: data parallel nodes, and the hosts of a node that is spread over several."""
