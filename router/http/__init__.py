"""The OpenAI-compatible HTTP API, as a FastAPI application over `router.service`.

`schemas` defines what clients send and `shapes` what they get. `responses` sends answers (whole or as events) and
notices clients that leave, `errors` gives every failure OpenAI's form, `scope` gives each request its id, `access`
checks its key. Below the application, `server` accepts connections, and `connection` keeps each within `limits`.
"""
