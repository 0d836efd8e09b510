"""What the router costs: the time that it adds to a first token (`overhead`), CPU per request within its own code
(`requests`), per token and open stream of a process (`streams`), and the index of the nodes' prefix caches
(`prefix_index`).

`scripted_nodes` are nodes without a model, `stream_clients` cheap clients.
"""
