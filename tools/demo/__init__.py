"""`make demo`: shows a cluster on this machine at work, and checks its answers meanwhile.

`cluster` starts it through `baton-up`, `client` sends requests as any client would, `scenes` are the parts of the demo,
`table` is the summary at the end. The prompts come from `tools/tiny_tasks.py`.
"""
