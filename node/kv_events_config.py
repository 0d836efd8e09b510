"""`--kv-events-config`: the form of vLLM's KVEventsConfig. Needs neither ZMQ nor msgspec."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_PORT = re.compile(r":(\d+)$")


class KvEventsConfig(BaseModel):
    """The JSON of `--kv-events-config`: the names and defaults of vLLM's KVEventsConfig."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = Field(10_000, ge=0)
    hwm: int = Field(100_000, ge=0)
    max_queue_size: int = Field(100_000, ge=1)
    topic: str = ""
    """Empty: kv@NODE@MODEL, the form that llm-d reads."""

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig:
        """Raises ValueError, of one line."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"--kv-events-config: {where + ': ' if where else ''}{first['msg']}") from None

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def of_node(self, index: int) -> KvEventsConfig:
        """For one of several nodes of a machine: what it binds gets a port `index` higher, as vLLM does it for ranks
        of data parallelism. Endpoints that nodes connect to, and those whose port the kernel chooses, stay."""
        replay = self.replay_endpoint
        changes = {
            "endpoint": _offset(self.endpoint, index) if is_bound(self.endpoint) else self.endpoint,
            "replay_endpoint": None if replay is None else _offset(replay, index),
        }
        return self.model_copy(update=changes)


def is_bound(endpoint: str) -> bool:
    """vLLM's rule: what names no host is bound, all else is connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _offset(endpoint: str, index: int) -> str:
    if endpoint.startswith("tcp://"):
        return _PORT.sub(lambda port: f":{int(port[1]) + index}", endpoint)
    return f"{endpoint}-{index}" if index else endpoint
