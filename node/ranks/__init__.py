"""The ranks of a node that has several: their processes on this host and on others, and what each has of the node."""
