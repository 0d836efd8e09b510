"""What fields and paths are for, in `/openapi.json`, `/docs` and docs/api.md.

A field's own description comes first, then `Schema.field` here, then `field`, since most names mean the same
everywhere. After "unset:" comes what applies without the field, where `field_table` does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPERATIONS: Mapping[str, str] = {
    "chat": "answers a chat",
    "completion": "continues prompts",
    "messages": "answers a chat, in the form of Anthropic's Messages API",
    "count_tokens": "the number of tokens of such a chat",
    "responses": "answers a conversation, in the form of OpenAI's Responses API",
    "input_tokens": "the number of tokens of such a prompt",
    "response": "a response that was kept",
    "delete_response": "forgets it",
    "cancel_response": "a 400: no response runs in the background",
    "input_items": "what it answered",
    "tokenize": "the tokens of a prompt, or of a chat",
    "detokenize": "the text of tokens",
    "tokenizer_info": "special tokens, added tokens, chat template; needs --enable-tokenizer-info-endpoint, else 404",
    "models": "the models that are served",
    "model": "one model",
    "health": "the process is alive",
    "ping": "the same as /health",
    "ping_post": "the same as /health",
    "ready": "requests can be answered",
    "load": "the number of prompts in flight, as `server_load`",
    "nodes": "every node: its state, why it gets no work, its version and load; which nodes are not paired, and why",
    "debug_console": "what the console shows: nodes, and running totals of requests, tokens, latencies and KV bytes",
    "debug_requests": "requests that run and the last that have ended, with the stages of their time to first token",
    "debug_request": "the timeline of a request: what happened when, in the router and on its nodes",
    "admin_nodes": "the router's nodes; needs a key of --admin-api-key, as all of /admin",
    "add_node": "adds a node, or takes back one that was drained or removed",
    "remove_node": "ends the session of a node, by address or id; its requests go on elsewhere",
    "drain_node": "places nothing more on a node, and removes it when it has finished what it has",
    "prefix_index": "how many KV blocks of each node's prefix cache the router knows of",
    "version": "baton's version",
    "metrics": "Prometheus metrics",
    "openapi": "the API, for programs",
    "docs": "the API, as a page",
    "console": "the live console, a web page; with --no-console a 404",
    "console_file": "a file of the console",
}

FIELDS: Mapping[str, str] = {
    "model": "name of the model; unset: the only one that is served",
    "messages": "the chat so far",
    "prompt": "a text, token ids, or a list of either",
    "system": "system prompt",
    "n": "answers to each prompt",
    "best_of": "answers to draw, of which the `n` likeliest are returned, whole; with `use_beam_search` its width",
    "use_beam_search": "find the most likely answers; `n` or `best_of` is the width",
    "beam_width": "above 0: find the most likely answers, by so many beams; `n` 0: all are answers",
    "length_penalty": "of a beam search: the power of the length by which scores are divided",
    "logits_processors": "names of installed ones, or objects with `name` or `qualname`, `args` and `kwargs`",
    "LogitsProcessorFields.name": "of an entry point in the group `baton.logits_processors` at the nodes",
    "qualname": "another name of `name`, as in vLLM",
    "args": "for its factory",
    "kwargs": "for its factory",
    "LogitsProcessor.name": "of an entry point in the group `baton.logits_processors` at the nodes",
    "priority": "requests with a lower one are served earlier; unset: 0",
    "stream": "send the answer in pieces, as server-sent events",
    "stream_options": "needs `stream`",
    "temperature": "0: the most likely token",
    "top_p": "draw from the likeliest tokens that have this probability together",
    "top_k": "number of likely tokens to draw from; 0 or -1: all",
    "min_p": "least probability of a token, relative to the most likely one",
    "repetition_penalty": "factor for tokens of the prompt and the answer",
    "presence_penalty": "taken from the logits of tokens in the answer",
    "frequency_penalty": "the same, times their number",
    "logit_bias": "token ids, with what is added to their logits",
    "seed": "same seed, same answer; modulo 2^64, -1: a drawn one",
    "max_tokens": "most tokens of an answer",
    "max_completion_tokens": "newer name of `max_tokens`, which it replaces",
    "min_tokens": "no end before so many tokens",
    "ignore_eos": "go on after the model's end of text",
    "stop": "texts that end the answer",
    "stop_sequences": "texts that end the answer",
    "stop_token_ids": "tokens that end the answer",
    "allowed_token_ids": "no other token is chosen",
    "bad_words": "texts that the answer does not have",
    "include_stop_str_in_output": "keep the text that ended the answer",
    "skip_special_tokens": "leave special tokens out of the text; unset: true",
    "spaces_between_special_tokens": "blanks around special tokens that are kept; unset: true",
    "truncate_prompt_tokens": "keep the last so many tokens of the prompt; -1: what `max_tokens` leaves of the context",
    "truncation_side": "`right`: `truncate_prompt_tokens` keeps the first tokens; unset: `left`",
    "return_token_ids": "add `token_ids` and, once for each prompt, `prompt_token_ids` to the answer",
    "return_prompt_text": "add `prompt_text`, what the template made of the chat, to the answer or its first chunk",
    "return_tokens_as_token_ids": "in logprobs, write tokens as `token_id:ID`",
    "return_token_strs": "add `token_strs` to the answer",
    "request_id": "for the log and the answer's id; the header `x-request-id` comes first",
    "cache_salt": "prompts are cached apart for each salt",
    "response_format": "`text`, `json_object`, `json_schema` or `structural_tag`",
    "structured_outputs": "`json`, `regex`, `choice`, `grammar` or `structural_tag`",
    "logprobs": "logprobs of the answer's tokens, and of so many likely ones",
    "CompletionRequest.max_tokens": "most tokens of an answer; null: the model's, else what fits into the context; "
    "unset: `16`",
    "ChatRequest.logprobs": "logprobs of the answer's tokens",
    "prompt_logprobs": "logprobs of the prompt's tokens, and of so many likely ones",
    "logprob_token_ids": "tokens whose logprobs come instead of the most likely ones'; needs `logprobs`",
    "top_logprobs": "logprobs of so many likely tokens; needs `logprobs`",
    "echo": "begin each text with its prompt",
    "ChatRequest.echo": "begin each content with the last message, if that is the assistant's or is continued",
    "add_special_tokens": "add the tokenizer's special tokens to a text; unset: true",
    "ChatRequest.add_special_tokens": "add the tokenizer's special tokens to what the template wrote; unset: false",
    "TokenizeRequest.add_special_tokens": "add special tokens; unset: true for a prompt, false for a chat",
    "TokenizeRequest.prompt": "a text",
    "GenerateRequest.prompt": "a text",
    "GenerateRequest.prompt_tokens": "token ids",
    "TokenizeRequest.messages": "a chat, instead of `prompt`",
    "add_generation_prompt": "begin the assistant's message at the prompt's end; unset: true",
    "continue_final_message": "the answer goes on from within the last message; excludes `add_generation_prompt`",
    "chat_template": "Jinja template instead of the model's; needs --trust-request-chat-template",
    "chat_template_kwargs": "more variables for the template",
    "include_reasoning": "false: without the reasoning that a parser finds, `logprobs` and `token_ids`; unset: true",
    "thinking_token_budget": "most tokens of reasoning; needs --reasoning-parser; -1: no bound",
    "reasoning_effort": "for the template; `none`: no reasoning, if it knows `enable_thinking` or `thinking`",
    "tools": "functions that the model may call",
    "tool_choice": "whether the model may or must call tools, or which one; unset: `auto` if there are tools",
    "parallel_tool_calls": "false: at most one call; unset: true",
    "metadata": "accepted, no effect",
    "tokens": "token ids",
    "input": "a text, or items",
    "InputMessage.status": "an assistant's last message that is `incomplete` or `in_progress` is continued",
    "instructions": "system prompt, of this response only",
    "ResponsesRequest.max_output_tokens": "most tokens of the answer",
    "InputTokensRequest.text": "changes nothing",
    "InputTokensRequest.reasoning": "`effort`, as of a response",
    "InputTokensRequest.previous_response_id": "count the conversation of a response that was kept, too",
    "InputTokensRequest.truncation": "changes nothing",
    "ResponsesRequest.text": "`format`: what the answer must match",
    "ResponsesRequest.reasoning": "`effort`, as the `reasoning_effort` of chats",
    "ResponsesRequest.previous_response_id": "go on from a response that was kept",
    "ResponsesRequest.truncation": "a conversation that is too long is a 400",
    "ResponsesRequest.metadata": "kept with the response",
    "ResponsesRequest.user": "accepted, no effect",
    "ResponsesRequest.safety_identifier": "accepted, no effect",
    "ResponsesRequest.prompt_cache_key": "accepted, no effect",
    "ResponsesRequest.service_tier": "accepted, no effect",
    "StreamOptions.include_usage": "add a last chunk with the usage",
    "StreamOptions.continuous_usage_stats": "add the usage to each chunk",
    "ChatMessage.content": "a text, or text parts, which become lines",
    "ChatMessage.role": "`developer` is `system` to a template that does not know it",
    "ChatMessage.name": "of the speaker",
    "ChatMessage.tool_calls": "of the assistant",
    "ChatMessage.tool_call_id": "of the call with this result",
    "ChatMessage.reasoning_content": "of the assistant",
    "CustomTool.strict": "as `Function.strict`",
    "thinking": "whether the model reasons before it answers; needs --reasoning-parser",
    "ThinkingConfig.type": "`adaptive` asks the template for the same as `enabled`",
    "ThinkingConfig.budget_tokens": "most tokens of reasoning, as `thinking_token_budget` of chats; below `max_tokens`",
    "output_config": "how hard the model is to think, and what its text must match",
    "OutputConfig.effort": "for the template, as `reasoning_effort`; not with `thinking` of type `disabled`",
    "OutputConfig.format": "what the text must match",
    "MessageToolChoice.type": "`any`: one call or more; `tool`: one call of the tool that is named",
    "MessageToolChoice.name": "for `tool`",
    "MessageToolChoice.disable_parallel_tool_use": "at most one call",
    "Function.strict": "the model can only write arguments that match; with `auto`, only for --tool-call-parser hermes",
    "Message.content": "a text, or blocks of text, which become lines",
}


def with_descriptions(document: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document, whose operations and fields get what is said here if they have no description."""
    for name, schema in document["components"]["schemas"].items():
        fields = schema.get("properties", {})
        for field, content in list(fields.items()):
            text = FIELDS.get(f"{name}.{field}") or FIELDS.get(field)
            if text and "description" not in content:
                fields[field] = {**content, "description": text}  # others may have the same content
    for operation in operations(document).values():
        if operation["operationId"] in OPERATIONS:
            operation.setdefault("summary", OPERATIONS[operation["operationId"]])
    return document


def operations(document: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """By method, in capitals, and path."""
    found = [(path, method, content) for path, item in document["paths"].items() for method, content in item.items()]
    return {(method.upper(), path): content for path, method, content in found if "operationId" in content}
