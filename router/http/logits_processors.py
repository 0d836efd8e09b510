"""`logits_processors`, in vLLM's form: names, or objects with a name and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from baton.errors import InvalidRequest
from baton.logits_processors import MAX_LOGITS_PROCESSORS, PARAM, LogitsProcessor
from router.http.fields import CONFIG, Name


class LogitsProcessorFields(BaseModel):  # type: ignore[no-redef]  # pydantic's plugin calls extra fields kwargs
    """`qualname` is vLLM's name for `name`."""

    model_config = CONFIG
    name: Name | None = None
    qualname: Name | None = None
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None

    def plain(self) -> LogitsProcessor:
        """Raises InvalidRequest."""
        names = [name for name in (self.name, self.qualname) if name is not None]
        if len(names) != 1:
            raise InvalidRequest(f"`{PARAM}`: an object must have `name` or `qualname`, and not both.", PARAM)
        return LogitsProcessor.of(names[0], self.args, self.kwargs)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


_Processor = Annotated[
    LogitsProcessorFields, BeforeValidator(_named, json_schema_input_type=Name | LogitsProcessorFields)
]
ProcessorList = Annotated[list[_Processor], Field(max_length=MAX_LOGITS_PROCESSORS)]


def plain_processors(wanted: Iterable[LogitsProcessorFields] | None) -> tuple[LogitsProcessor, ...]:
    """Raises InvalidRequest."""
    return tuple(one.plain() for one in wanted or ())
