"""Ways to run baton. `up` (the command `baton-up`) starts a whole cluster on one machine.

`settings` are the command's flags, `plan` decides which processes run with which flags, `ports` holds their ports,
`supervisor` keeps them running, `child` starts each. `healthy` is the health check of containers. No torch here, but in
the processes of `doctor`. May import everything; nothing imports it. `bench`, `doctor`, `top` and `tune` are
subcommands of `baton`, with a folder each.
"""
