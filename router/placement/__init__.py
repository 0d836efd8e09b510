"""Which nodes a request's next attempt gets: the nodes that are up (`pool`), what each holds (`prefix_index`), how fast
it is (`rates`), and which of them fit each other. `router.policies` choose among them. Without I/O, like
`router.requests`.
"""
