"""OpenAI's Responses API: `/v1/responses`. A request for a response becomes a `ChatRequest`, and runs as one.

`schemas` and `items` define what clients send, and `unsupported` which fields are refused; `conversation` makes the
messages of a chat from it. `output` and `shape` define what they get, and `events` how it is streamed. `store` keeps
responses for `previous_response_id` and for `GET`.
"""
