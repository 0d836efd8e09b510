"""The routes of the Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.http.answers import dump_json, raw_json_response
from router.http.anthropic.events import MessageEvents
from router.http.anthropic.schemas import CountTokensRequest, MessagesRequest
from router.http.anthropic.shape import MessageShape
from router.http.body import BodyReader
from router.http.errors.anthropic import PATH
from router.http.limits import HttpLimits
from router.http.responses import EventResponse, WholeResponse
from router.http.tools import call_plan, plain_tools
from router.limits import MAX_COUNTED_CHARS
from router.service import Service
from router.text.answer_reader import Parsers
from router.text.constraints import constrained, naming_constraint
from router.text.generation_request import encode
from router.text.models import ServedModel
from router.text.thinking_budget import with_thinking_target


class MessagesRoutes:
    """`parsers`: for all answers."""

    def __init__(self, service: Service, limits: HttpLimits, parsers: Parsers) -> None:
        self._service = service
        self._parsers = parsers
        self._keep_alive_s = limits.keep_alive_s
        self._bodies = BodyReader(limits.bodies, service.offload)
        self.routes = APIRouter()
        self.posts = {PATH: self.messages}
        self.routes.add_api_route(PATH, self.messages, methods=["POST"])
        self.routes.add_api_route(f"{PATH}/count_tokens", self.count_tokens, methods=["POST"])

    async def messages(self, request: Request) -> Response:
        body = await self._bodies.read(request, MessagesRequest)
        body.check()
        model = self._service.model(body.model)
        state = request.state
        plan = call_plan(self._parsers, body.chat_tools, body.chat_choice, body.parallel_tool_calls)
        with self._service.admit(model, [body.size]) as admitted, naming_constraint(plan, body.constraint):
            prompt = await self._prompt(model, body)
            reading = plan.reading(self._parsers, prompt, body.parallel_tool_calls, body.begun)
            wanted = body.wanted(state.request_id, prompt, plan.is_forced)
            wanted = constrained(wanted, plan, reading)
            if (budget := body.thinking_budget) is not None:
                wanted = with_thinking_target(wanted, budget, reading, model.tokenizer)
            generation = await self._service.generate(
                model, (wanted,), state.received, admitted, state.client, state.tenant
            )
        shape = MessageShape(state.request_id, model, reading)
        if body.stream:
            return EventResponse(generation, MessageEvents(generation, shape), self._keep_alive_s)
        return WholeResponse(generation, shape, self._service.offload)

    async def count_tokens(self, request: Request) -> Response:
        """Also of prompts that are longer than the context."""
        body = await self._bodies.read(request, CountTokensRequest)
        body.check()
        model = self._service.models.get(body.model)
        with self._service.admit(model, [body.size]):
            prompt = await self._prompt(model, body)

            def answer() -> bytes:
                return dump_json({"input_tokens": len(encode(prompt, model, False, MAX_COUNTED_CHARS))})

            return raw_json_response(await self._service.offload.run(answer, len(prompt)))

    async def _prompt(self, model: ServedModel, body: CountTokensRequest) -> str:
        return await self._service.render_chat(
            model,
            body.chat,
            body.size,
            variables=body.variables(self._parsers.reasoning is not None),
            continue_final_message=body.continues,
            tools=lambda: plain_tools(body.chat_tools) if self._parsers.shows_tools(body.chat_choice) else None,
        )
