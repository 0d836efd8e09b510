"""What the processes of a router with `--workers N` share: both ports, and a socket of each (`siblings`), over which
`/metrics` and `/load` speak for all.

`router.supervisor` keeps N of them running. Each is a `router.worker`: a router of its own towards the nodes, with its
own epoch, sessions and limits. The kernel gives each new connection to one of them.
"""
