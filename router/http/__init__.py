"""The HTTP API, compatible with OpenAI's and (`anthropic`) with Anthropic's, as a FastAPI application over
`router.service`.

`schemas` defines what clients send, `shapes` and `chunks` what they get. `responses` sends answers (whole or as events)
and notices clients that leave, `errors` gives every failure the form of its API, `scope` gives each request its id,
`access` checks its key. `console` is a web page for operators. Below the application, `server` accepts connections, and
`connection` keeps each within `limits`.
"""
