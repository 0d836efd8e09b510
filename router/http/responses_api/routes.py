"""The routes of the Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import State

from baton.errors import InvalidRequest
from router.generation import Generation
from router.http.answers import raw_json_response
from router.http.body import BodyReader
from router.http.errors.names import rename_field
from router.http.errors.responses_api import ItemNotFound
from router.http.generate import GenerateRoutes
from router.http.limits import HttpLimits
from router.http.responses import EventResponse, WholeResponse
from router.http.responses_api.background import BackgroundResponses
from router.http.responses_api.conversation import AnyItem
from router.http.responses_api.events import ResponseEvents
from router.http.responses_api.items import ItemReference
from router.http.responses_api.output import response_of
from router.http.responses_api.pages import page_of
from router.http.responses_api.schemas import InputTokensRequest, ResponsesRequest
from router.http.responses_api.shape import ResponseShape
from router.http.responses_api.store import ResponseSaver, ResponseStore, dump_items
from router.http.scope import request_id_of
from router.offload.threads import Offload
from router.service import Service
from router.text.answer import Delta

PATH = "/v1/responses"

_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
"""Of fields of chats: what they are here."""
_NOT_KEPT = "`store` is true, but this router keeps no responses (--max-stored-responses)."
_NOTHING_IN_BACKGROUND = "`background` needs a router that keeps responses (--max-stored-responses)."
_NOT_IN_BACKGROUND = "Only responses with `background` can be cancelled."
_HAS_ENDED = "Cannot cancel a response that has ended."
_NOT_STREAMED_AGAIN = "A response that is kept is not streamed again: `stream` is not supported here."


@dataclass(frozen=True, slots=True)
class Started:
    """A response under way. `saver` keeps it when it has ended; None: it is not kept."""

    generation: Generation
    shape: ResponseShape
    saver: ResponseSaver | None

    def events(self) -> ResponseEvents:
        return ResponseEvents(self.shape, self.saver)


class ResponsesRoutes:
    """`generate` runs responses as chats."""

    def __init__(self, service: Service, limits: HttpLimits, generate: GenerateRoutes, store: ResponseStore) -> None:
        self._service = service
        self._keep_alive_s = limits.keep_alive_s
        self._bodies = BodyReader(limits.bodies, service.offload)
        self._generate = generate
        self._store = store
        self._background = BackgroundResponses()
        self.routes = APIRouter()
        self.posts = {PATH: self.create}
        self.routes.add_api_route(PATH, self.create, methods=["POST"])
        self.routes.add_api_route(f"{PATH}/input_tokens", self.input_tokens, methods=["POST"])
        one = f"{PATH}/{{response_id}}"
        self.routes.add_api_route(one, self.retrieve, methods=["GET"])
        self.routes.add_api_route(one, self.delete, methods=["DELETE"])
        self.routes.add_api_route(f"{one}/cancel", self.cancel, methods=["POST"])
        self.routes.add_api_route(f"{one}/input_items", self.input_items, methods=["GET"])

    async def create(self, request: Request) -> Response:
        body = await self._bodies.read(request, ResponsesRequest)
        started = await self.start(request.state, request_id_of(request, body.request_id), body)
        if body.stream:
            return EventResponse(started.generation, started.events(), self._keep_alive_s)
        whole = _WholeResponse(started, self._service.offload)
        if not body.background:
            return whole
        assert started.saver is not None  # `start` has checked it
        self._background.start(started.generation, started.shape, started.saver, whole.keep)
        return JSONResponse(started.shape.begun())

    async def start(
        self, state: State, request_id: str, body: ResponsesRequest, own: ResponseStore | None = None
    ) -> Started:
        """Start a response, with the state of its HTTP request. `own`: of a connection, for responses that are not to
        be stored. Raises BatonError."""
        body.check()
        model = self._service.model(body.model)
        if body.store and not self._store.is_on:
            raise InvalidRequest(_NOT_KEPT, "store")
        if body.background and not self._store.is_on:
            raise InvalidRequest(_NOTHING_IN_BACKGROUND, "background")
        stored = body.store is not False and self._store.is_on
        store = self._store if stored else own
        items = await self._conversation(state.owner, body, own)
        try:
            chat = body.chat(items).with_num_logprobs(model)
            dumped = await self._dumped(items) if store else b""
            generation, reading, _ = await self._generate.start_chat(state, request_id, model, chat)
        except InvalidRequest as error:
            rename_field(error, _NAMES)
            raise
        shape = ResponseShape(body, model, generation, reading, stored)
        return Started(generation, shape, ResponseSaver(store, state.owner, shape.id, dumped) if store else None)

    async def input_tokens(self, request: Request) -> JSONResponse:
        """How many tokens the prompt of such a request has."""
        body = await self._bodies.read(request, InputTokensRequest)
        body.check()
        model = self._service.models.get(body.model)
        items = await self._conversation(request.state.owner, body, None)
        try:
            count = await self._generate.count_tokens(model, body.chat(items))
        except InvalidRequest as error:
            rename_field(error, _NAMES)
            raise
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def retrieve(self, request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise InvalidRequest(_NOT_STREAMED_AGAIN, "stream")
        return raw_json_response(self._store.get(request.state.owner, response_id).body)

    async def delete(self, request: Request, response_id: str) -> JSONResponse:
        self._store.delete(request.state.owner, response_id)
        self._background.drop(request.state.owner, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, response_id: str) -> Response:
        """The response, which has ended then."""
        owner = request.state.owner
        stored = self._store.get(owner, response_id)
        if await self._background.cancel(owner, response_id):
            return raw_json_response(self._store.get(owner, response_id).body)
        response = await self._service.offload.run(stored.response, len(stored.body))
        if not response["background"]:
            raise InvalidRequest(_NOT_IN_BACKGROUND, "response_id")
        if response["status"] != "cancelled":
            raise InvalidRequest(_HAS_ENDED, "response_id")
        return raw_json_response(stored.body)

    async def input_items(self, request: Request, response_id: str) -> JSONResponse:
        """The whole conversation before the response."""
        stored = self._store.get(request.state.owner, response_id)
        items = await self._service.offload.run(stored.input_items, len(stored.input))
        return JSONResponse(page_of(items, request.query_params))

    async def _conversation(self, owner: bytes, body: ResponsesRequest, own: ResponseStore | None) -> list[AnyItem]:
        """All items up to the answer, with those that are kept in place of their references. Raises InvalidRequest."""
        items: list[AnyItem] = []
        if (earlier := body.previous_response_id) is not None:
            stored = self._store_of(owner, earlier, own).previous(owner, earlier)
            items += await self._service.offload.run(stored.conversation, stored.size)
        kept = await self._kept(owner, body, own)
        for item in body.input:
            if not isinstance(item, ItemReference):
                items.append(item)
            elif item.id in kept:
                items.append(kept[item.id])
            else:
                raise ItemNotFound(item.id)
        return items

    async def _kept(self, owner: bytes, body: ResponsesRequest, own: ResponseStore | None) -> dict[str, AnyItem]:
        """The items of the responses that references in `body` are to, by their ids."""
        named = {response_of(item.id) for item in body.input if isinstance(item, ItemReference)}
        stores = [(self._store_of(owner, response_id, own), response_id) for response_id in named]
        found = [store.get(owner, response_id) for store, response_id in stores if store.has(owner, response_id)]

        def items() -> dict[str, AnyItem]:
            return {item.id: item for stored in found for item in stored.output() if item.id}

        return await self._service.offload.run(items, sum(len(stored.body) for stored in found)) if found else {}

    def _store_of(self, owner: bytes, response_id: str, own: ResponseStore | None) -> ResponseStore:
        return own if own is not None and own.has(owner, response_id) else self._store

    async def _dumped(self, items: Sequence[AnyItem]) -> bytes:
        return await self._service.offload.run(lambda: dump_items(items), sum(item.size for item in items))


class _WholeResponse(WholeResponse):
    """The response at once; kept before it is sent."""

    def __init__(self, started: Started, offload: Offload) -> None:
        super().__init__(started.generation, started.shape, offload)
        self._started = started

    async def keep(self) -> None:
        """Wait for the response and keep it. Raises BatonError."""
        await self._answer(await self._collect())

    async def _answer(self, deltas: dict[int, list[Delta]]) -> Response:
        response = await super()._answer(deltas)
        if self._started.saver is not None:
            self._started.saver.keep(bytes(response.body))
        return response
