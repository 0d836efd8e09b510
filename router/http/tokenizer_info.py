"""`/tokenizer_info`: what a client needs to render chats and count tokens by itself."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter
from fastapi.responses import Response

from baton.errors import InvalidRequest
from router.http.answers import json_response
from router.service import Service
from router.text.models import ServedModel

PATH = "/tokenizer_info"
_TOKEN_SIZE = 128
"""Of an added token, in characters of JSON."""


class NotEnabled(InvalidRequest):
    """The path is there only with a flag."""

    http_status: ClassVar[int] = 404
    grpc_status: ClassVar[str] = "NOT_FOUND"


class TokenizerInfoRoutes:
    """`enabled`: a chat template may be a secret of its operator, so the path has a flag, as in vLLM."""

    def __init__(self, service: Service, enabled: bool) -> None:
        self._service = service
        self._enabled = enabled
        self.routes = APIRouter()
        self.routes.add_api_route(PATH, self.info, methods=["GET", "HEAD"])

    async def info(self, model: str | None = None) -> Response:
        """`model`: its name, where several are served."""
        if not self._enabled:
            raise NotEnabled(f"{PATH} needs --enable-tokenizer-info-endpoint, with which this router was not started.")
        served = self._service.models.get(model)
        added = served.tokenizer.added_tokens()
        size = len(served.chat_template) + len(added) * _TOKEN_SIZE
        return await json_response(lambda: describe(served, added), size, self._service.offload)


def describe(model: ServedModel, added_tokens: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The fields of a tokenizer_config.json that the router's nodes announce."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # transformers' class for a tokenizer.json
        **model.special_tokens,
        "added_tokens_decoder": added_tokens,
        "model_max_length": model.max_model_len,
        "chat_template": model.chat_template or None,
    }
