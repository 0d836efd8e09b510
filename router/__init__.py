"""The router: takes requests over HTTP and gRPC, places each on a prefill and a decode node, and follows it to its end.

No torch here: it learns tokenizer, chat template and limits from its nodes. `core` is the protocol's state machine
(with `life`, a request as it stands, and `placement`); `nodes` keeps the streams to the nodes; `service` turns client
requests into token ids and tokens into text; `http` and `grpc_service` are the two front ends. May import `baton` only.
"""
