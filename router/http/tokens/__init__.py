"""vLLM's API of tokens: a prompt of token ids gets answers of token ids; and what chats and completions become as such
requests.

Clients that tokenize themselves use it, as training with reinforcement learning does. `schemas` has what clients send,
`shape` how answers look, `rendered` makes a request of this API of a chat or a completion."""
