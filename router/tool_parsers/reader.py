"""What the parsers of this package share: content up to a mark, and calls that begin once they look like ones."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

from router.tool_parsers.base import ToolParser, Tools
from router.tool_parsers.json_text import Emit, mark, read_object, read_object_in_string, read_text, read_value
from router.tool_parsers.pieces import CallArguments, CallStart, Content, Piece
from router.tool_parsers.source import Reading, Source, any_of

_IGNORED_KEYS = ("id", "type")
_IN_NAME = re.compile(r"[A-Za-z0-9_.-]")
_MAX_NAME_CHARS = 256


class ArgumentsReader(Protocol):
    """Reads a call's arguments and emits the text of a JSON object, like `read_object`."""

    def __call__(self, source: Source, emit: Emit, *, begun: Callable[[], None]) -> Reading[bool]: ...


class ReadingParser(ToolParser):
    """`marks`: where calls may begin; no mark begins with another. A subclass reads a call in `read_call`.

    Blanks before, between and after calls are dropped if there is nothing else, like `separators` between calls.
    """

    marks: ClassVar[tuple[str, ...]]
    separators: ClassVar[str] = ""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self.source = Source()
        self._pattern: re.Pattern[str] = any_of(self.marks)
        self._dropped = " \t\r\n" + self.separators
        self._out: list[Piece] = []
        self._blanks: list[str] = []
        self._only_blanks = True  # since the beginning or the last call
        self.num_calls = 0
        self._run = self._read()

    def feed(self, text: str) -> list[Piece]:
        self.source.add(text)
        next(self._run, None)
        return self._flush()

    def finish(self) -> list[Piece]:
        self.source.end()
        next(self._run, None)
        if self._blanks and not self.num_calls:
            self._out.append(Content("".join(self._blanks)))
        self._blanks = []
        return self._flush()

    @abstractmethod
    def read_call(self, found: str) -> Reading[None]:
        """Read from `found`, one of the marks. What is not part of a call goes to `content`, at least one character
        of it is read."""

    def content(self, text: str) -> None:
        if not self._only_blanks:
            self._out.append(Content(text))
        elif text.strip(self._dropped):
            self._out.append(Content("".join([*self._blanks, text])))
            self._blanks, self._only_blanks = [], False
        elif text:
            self._blanks.append(text)

    def start_call(self, name: str, call_id: str | None = None) -> Callable[[str], None]:
        """Begin a call; returns what takes the text of its arguments."""
        index = self.num_calls
        self.num_calls += 1
        self._blanks, self._only_blanks = [], True
        self._out.append(CallStart(index, call_id or self.new_id(), name))
        return lambda text: self._out.append(CallArguments(index, text))

    def read_name(self, chars: re.Pattern[str] = _IN_NAME) -> Reading[str]:
        """What is in the place of a name, of a tool or a parameter: `chars` matches each of its characters."""
        return (yield from self.source.text_of(chars, _MAX_NAME_CHARS))

    def read_ends(self, *ends: str) -> Reading[None]:
        """Those of these marks that come next, with blanks before each: they belong to the call that was read."""
        for end in ends:
            yield from self.source.blanks()
            if (yield from self.source.literal(end)):
                self.source.begin()

    def read_arguments(
        self, name: str, call_id: str | None = None, read: ArgumentsReader = read_object
    ) -> Reading[bool]:
        """A call whose arguments come next, as a JSON object or what `read` makes one of. False: they are not one.
        Either way the text that is no call is what `source.taken` has."""
        call = _Call(self, name, call_id)
        whole = yield from read(self.source, call.add, begun=call.begin)
        if whole:
            self.source.begin()
        return whole

    def read_call_list(self) -> Reading[bool]:
        """Calls as objects in a list whose beginning was read. As `read_list`."""
        return (yield from self.read_list(self.read_call_object))

    def read_list(self, read_one: Callable[[], Reading[bool]]) -> Reading[bool]:
        """What `read_one` reads, several times, in a list whose beginning was read. False: it does not end, or has
        something else."""
        source = self.source
        while True:
            yield from source.blanks()
            if not (yield from read_one()):
                return False
            yield from source.blanks()
            if (yield from source.literal("]")):
                source.begin()
                return True
            if not (yield from source.literal(",")):
                return False

    def read_call_object(self) -> Reading[bool]:
        """A call as an object with its name and arguments, in either order. As `read_arguments`."""
        source, call = self.source, _Call(self)
        if not (yield from source.literal("{")):
            return False
        while True:
            yield from source.blanks()
            key = yield from read_text(source)
            if key is None or not (yield from mark(source, ":", _ignore)):
                return False
            yield from source.blanks()
            if not (yield from self._read_member(call, key)):
                return False
            if (yield from mark(source, "}", _ignore)):
                if call.has_begun:
                    source.begin()
                return call.has_begun
            if not (yield from mark(source, ",", _ignore)):
                return False

    def _read_member(self, call: _Call, key: str) -> Reading[bool]:
        if key in _IGNORED_KEYS:
            return (yield from read_value(self.source, _ignore))
        if key == "name" and call.name is None:
            name = yield from read_text(self.source)
            if name not in self.tools:
                return False
            call.name = name
            if call.is_complete:
                call.begin()
                self.source.begin()
            return True
        if key not in ("arguments", "parameters") or call.is_complete:
            return False
        call.is_complete = yield from self._read_member_arguments(call)
        if call.is_complete and call.has_begun:
            self.source.begin()
        return call.is_complete

    def _read_member_arguments(self, call: _Call) -> Reading[bool]:
        match (yield from self.source.peek()):
            case "n":
                found = "{}" if (yield from self.source.literal("null")) else None
            case '"':
                found = yield from read_object_in_string(self.source)
            case _:
                return (yield from read_object(self.source, call.add, begun=call.begin))
        if found is None:
            return False
        call.add(found)
        call.begin()
        return True

    def _read(self) -> Reading[None]:
        while found := (yield from self.source.until(self.marks, self._pattern, self.content)):
            self.source.begin()
            yield from self.read_call(found)
            self.content(self.source.taken())
            self.source.forget()

    def _flush(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


class _Call:
    """A call as it is read: its arguments are held until its name is known, and they look like an object."""

    def __init__(self, parser: ReadingParser, name: str | None = None, call_id: str | None = None) -> None:
        self.name = name
        self.has_begun = False
        self.is_complete = False
        self._parser = parser
        self._id = call_id
        self._held: list[str] = []
        self._emit: Callable[[str], None] | None = None

    def add(self, text: str) -> None:
        if self._emit:
            self._emit(text)
        else:
            self._held.append(text)

    def begin(self) -> None:
        """Begins unless its name is still unknown. What is read from now on belongs to the arguments."""
        if self.name is None or self.has_begun:
            return
        self.has_begun = True
        self._emit = self._parser.start_call(self.name, self._id)
        self._emit("".join(self._held))
        self._held = []
        self._parser.source.forget()


def _ignore(_: str) -> None:
    pass
