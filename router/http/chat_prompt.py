"""Turns a chat into a prompt, the same for all front ends."""

from __future__ import annotations

from baton.errors import InvalidRequest
from router.http.body import validate
from router.http.schemas import Chat, ChatRequest, TokenizeRequest
from router.http.tools import plain_tools
from router.service import Service
from router.text.models import ServedModel


def read_chat(text: str) -> Chat:
    """The chat that a JSON object says. Raises InvalidRequest."""
    try:
        chat = validate(text.encode(errors="surrogatepass"), Chat)
        chat.check()
    except InvalidRequest as error:
        raise InvalidRequest(f"The chat is invalid: {error.message}", error.param or "messages") from None
    return chat


async def chat_prompt(
    service: Service, model: ServedModel, body: ChatRequest | TokenizeRequest | Chat, size: int
) -> str:
    """The prompt that the model's template makes of a chat of `size` characters. Raises InvalidRequest or
    Overloaded."""
    messages = body.messages or ()
    return await service.render_chat(
        model,
        lambda: [message.plain() for message in messages],
        size,
        body.add_generation_prompt is not False,
        body.variables,
        bool(body.continue_final_message),
        lambda: plain_tools(body.tools),
        body.chat_template,
    )
