"""The router: takes requests over HTTP and gRPC, places each on a prefill and a decode node, and follows it to its end.

No torch here: it learns tokenizer, chat template and limits from its nodes. `core` is the protocol's state machine
(with `life`, a request as it stands; `attempts`, what of it is on which nodes; and `placement`), and `dispatcher` runs
it; `nodes` keeps the streams to nodes, `models` what they tell of the model; `service` turns client requests into token
ids, `generation` tokens into text; `http` and `grpc_service` are the two front ends, `server` puts it all together. May
import `baton` only.
"""
