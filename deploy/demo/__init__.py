"""`make demo`: a cluster on this machine, shown at work, and checked while it is shown.

`cluster` starts one through `baton-up`, `client` asks it as any client would, `scenes` are what is shown, `table` the
account at the end. Needs a clone with the development tools: its prompts come from `tools/tiny_tasks.py`.
"""
