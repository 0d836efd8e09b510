"""The OpenAI-compatible HTTP API, as a FastAPI application over `router.service`.

`schemas` is what clients send, `shapes` what they get, `responses` sends it (whole or as events) and notices clients
that leave, `errors` gives every failure OpenAI's form, `scope` names each request, `access` asks for its key. Below the
application, `server` takes connections and `connection` bounds each, by `limits`.
"""
