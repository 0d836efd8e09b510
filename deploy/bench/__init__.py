"""`baton bench`: load on any server with OpenAI's API, and what its users would have seen.

`settings` are the flags, `trace` and `workloads` say what is asked, `arrivals` when, `prompts` in which text. `client`
streams one request over HTTP, `load` runs all of them, `goodput` looks for the highest rate within limits, `figures`
computes the percentiles, `page` draws them. Imports only `baton` and this package: no torch, no node, no router.
"""
