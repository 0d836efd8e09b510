"""Where a router's nodes are: fixed lists, DNS names, a watched file, and what an operator adds or takes away.

Each source tells the whole set of nodes that it knows (`source`), and `membership` makes one wanted set of all. Links
to nodes begin and end elsewhere (`router.nodes.cluster`). May import `baton` only.
"""
