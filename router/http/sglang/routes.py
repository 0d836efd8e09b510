"""The routes of SGLang's API: answers, and what its clients ask a server before."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

import baton
from baton.errors import InvalidRequest
from router.http.body import BodyReader
from router.http.errors.names import rename_field
from router.http.limits import HttpLimits
from router.http.responses import EventResponse, WholeResponse
from router.http.scope import request_id_of
from router.http.sglang.events import SglangEvents
from router.http.sglang.schemas import SglangRequest
from router.http.sglang.shape import SglangShape, weight_version
from router.service import Service
from router.text.call_plan import NO_CALLS
from router.text.constraints import naming_constraint
from router.text.models import ServedModel

PATH = "/generate"
MODEL_INFO = ("/get_model_info", "/model_info")
SERVER_INFO = ("/get_server_info", "/server_info")
"""The older name and the newer one: clients call either."""


class SglangRoutes:
    def __init__(self, service: Service, limits: HttpLimits) -> None:
        self._service = service
        self._keep_alive_s = limits.keep_alive_s
        self._bodies = BodyReader(limits.bodies, service.offload)
        self.routes = APIRouter()
        self.posts = {PATH: self.generate}
        self.routes.add_api_route(PATH, self.generate, methods=["POST"])
        for path in MODEL_INFO:
            self.routes.add_api_route(path, self.model_info, methods=["GET", "HEAD"])
        for path in SERVER_INFO:
            self.routes.add_api_route(path, self.server_info, methods=["GET", "HEAD"])

    async def generate(self, request: Request) -> Response:
        body = await self._bodies.read(request, SglangRequest)
        sizes = body.sizes
        await self._service.offload.run(body.check, sum(sizes))
        model = self._service.model(body.model)
        state = request.state
        request_id = request_id_of(request, body.request_id)
        try:
            with (
                self._service.admit(model, sizes, body.num_samples) as admitted,
                naming_constraint(NO_CALLS, body.constraint),
            ):
                wanted = await self._service.offload.run(lambda: body.wanted(request_id, model), sum(sizes))
                generation = await self._service.generate(
                    model, wanted, state.received, admitted, state.client, state.tenant
                )
        except InvalidRequest as error:
            rename_field(error, body.names)
            raise
        shape = SglangShape(model, body, body.answer_ids(request_id))
        if body.stream:
            return EventResponse(generation, SglangEvents(generation, shape), self._keep_alive_s)
        return WholeResponse(generation, shape, self._service.offload)

    async def model_info(self, model: str | None = None) -> JSONResponse:
        """`model`: its name, where several are served."""
        served = self._service.models.get(model)
        defaults = dataclasses.asdict(served.defaults)
        del defaults["eos_token_ids"]
        preferred = {name: value for name, value in defaults.items() if value is not None}
        return JSONResponse(
            {
                **_names(served),
                "is_generation": True,
                "preferred_sampling_params": preferred or None,
                "weight_version": weight_version(served),
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": None,
                "architectures": None,
            }
        )

    async def server_info(self, model: str | None = None) -> JSONResponse:
        """See `model_info`."""
        served = self._service.models.get(model)
        return JSONResponse(
            {
                **_names(served),
                "context_length": served.max_model_len,
                "max_req_input_len": served.max_model_len - 1,
                "page_size": served.block_size,
                "version": baton.__version__,
                "internal_states": [],
            }
        )


def _names(model: ServedModel) -> dict[str, Any]:
    """The router knows no folder, only by which name clients ask for the model."""
    return dict.fromkeys(("model_path", "tokenizer_path", "served_model_name"), model.name)
