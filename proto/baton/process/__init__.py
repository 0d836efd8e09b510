"""What a process of baton owes its system and its operator: signals, its parent, descriptors, threads, CPUs, memory,
and output that nobody reads.
"""
