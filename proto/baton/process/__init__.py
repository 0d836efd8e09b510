"""What a process of baton owes its system and its operator: signals, its parent, descriptors, threads, and output that
nobody reads.
"""
