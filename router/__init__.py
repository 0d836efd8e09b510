"""The router: takes requests over HTTP and gRPC, places each on a prefill and a decode node, and follows it to its end.

It needs no torch: it learns tokenizer, chat template and limits from its nodes. `core` is the protocol's state machine
(with `request_state`, the state of one request, `attempts`, which parts of it are on which nodes, and `placement`), and
`dispatcher` runs it. `discovery` says where nodes are, `cluster` has a link (`nodes`) to each, and `models` is what
they say about their models and `versions`. `service` turns client requests into token ids, `generation` turns tokens
into text. `http` and `grpc_service` are the two front ends, and `server` puts everything together. May import `baton`
only.
"""
