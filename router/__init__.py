"""The router: takes requests over HTTP and gRPC, places each on a prefill and a decode node, and follows it to its end.

It needs no torch: it learns tokenizer, chat template and limits from its nodes. A request passes these rooms:

    http, grpc      front ends: a client's request, and the answer as it reads it
    service         a prompt as token ids, with what would block the event loop in `offload`
    generation      one request while it runs: its tokens become text
    nodes           links to nodes, over which it is sent, and `dispatcher`, which runs the state machine
    requests        the state machine: attempts at a request, and what follows when one fails
    placement       which nodes for an attempt, by `policies`
    text            tokens to text and back: tokenizer, chat template, stop strings, tool calls

`discovery` says where nodes are. `server` puts everything together; with `--workers`, `supervisor` runs several of it.
May import `baton` only.
"""
