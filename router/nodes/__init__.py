"""Streams to nodes: a link to each (`links`) while `cluster` wants it, and `dispatcher`, which passes what comes over
them to the state machine and its actions back. `report` is what operators see of it.
"""
