"""The ranks of a node that has several: their processes, on this host and on others, and each rank's part of the
node."""
