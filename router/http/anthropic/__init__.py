"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`, over the same service as the other routes.

`schemas` and `content` define what clients send, and `unsupported` which fields are refused. `shape` defines what they
get, and `events` how it is streamed. `errors` is the form of every failure below `/v1/messages`; `router.http.errors`
chooses it by the path.
"""
