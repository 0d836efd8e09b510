"""Reads JSON as it arrives. Its text is passed on as it is, but for what most readers of JSON refuse in strings, and
models write: raw control characters, which are escaped, and halves of surrogate pairs, which are replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from router.tool_parsers.source import Reading, Source

Emit = Callable[[str], None]

MAX_DEPTH = 64
_MAX_KEY_CHARS = 1024
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]{0,512}")
VALID_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HEX = re.compile(r"[0-9a-fA-F]")
_FIRST_HALF, _SECOND_HALF = re.compile(r"[dD][89abAB].."), re.compile(r"[dD][c-fC-F]..")
"""Of a surrogate pair, as hexadecimal digits."""
_REPLACEMENT = "\\ufffd"


def read_value(source: Source, emit: Emit, depth: int = 0) -> Reading[bool]:
    """Read a value. False: it is not JSON; what was read has been emitted, and is the beginning of JSON: readers of a
    stream parse it."""
    char = yield from source.peek()
    if char == '"':
        return (yield from _read_string(source, emit))
    if char == "{":
        return (yield from read_object(source, emit, depth))
    if char == "[":
        return (yield from _array(source, emit, depth))
    word = yield from source.ahead(_WORD)
    if not _begins_word(word):
        return False
    yield from source.literal(word)
    emit(word)
    return VALID_WORD.fullmatch(word) is not None


def read_object(source: Source, emit: Emit, depth: int = 0, begun: Callable[[], None] | None = None) -> Reading[bool]:
    """As `read_value`. `begun` is called when the text has shown to be an object: after its first name, or its end."""
    if depth >= MAX_DEPTH or not (yield from mark(source, "{", emit)):
        return False
    if (yield from mark(source, "}", emit)):
        if begun:
            begun()
        return True
    while True:
        yield from _blanks(source, emit)
        if not (yield from _read_string(source, emit)) or not (yield from mark(source, ":", emit)):
            return False
        if begun:
            begun()
            begun = None
        yield from _blanks(source, emit)
        if not (yield from read_value(source, emit, depth + 1)):
            return False
        if (yield from mark(source, "}", emit)):
            return True
        if not (yield from mark(source, ",", emit)):
            return False


def _read_string(source: Source, emit: Emit) -> Reading[bool]:
    """As `read_value`, for a string."""
    if not (yield from source.literal('"')):
        return False
    emit('"')
    while True:
        yield from source.run(_PLAIN, emit)
        char = yield from source.peek()
        if not char:
            return False
        yield from source.literal(char)
        if char == '"':
            emit(char)
            return True
        if char != "\\":
            emit(json.dumps(char)[1:-1])
        elif not (yield from _escape(source, emit)):
            return False


def read_text(source: Source) -> Reading[str | None]:
    """A short string, as a name is; None: it is not one."""
    pieces: list[str] = []
    num_chars = 0

    def emit(text: str) -> None:
        nonlocal num_chars
        num_chars += len(text)
        if num_chars <= _MAX_KEY_CHARS:
            pieces.append(text)

    if not (yield from _read_string(source, emit)) or num_chars > _MAX_KEY_CHARS:
        return None
    return str(json.loads("".join(pieces)))


def read_object_in_string(source: Source) -> Reading[str | None]:
    """A string whose text is an object, as some models write arguments: that text. None: it is not one."""
    pieces: list[str] = []
    if not (yield from _read_string(source, pieces.append)):
        return None
    inner, found = Source(), list[str]()
    inner.add(json.loads("".join(pieces)))
    inner.end()
    whole = yield from read_object(inner, found.append)
    yield from inner.blanks()
    return "".join(found) if whole and not (yield from inner.peek()) else None


def mark(source: Source, char: str, emit: Emit) -> Reading[bool]:
    """Read blanks and one character of punctuation, if it is the next."""
    yield from _blanks(source, emit)
    if not (yield from source.literal(char)):
        return False
    emit(char)
    return True


def _begins_word(word: str) -> bool:
    """Whether a valid word begins like that."""
    begins_name = any(name.startswith(word) for name in ("true", "false", "null"))
    return begins_name or any(VALID_WORD.fullmatch(word + more) for more in ("", "0"))


def _array(source: Source, emit: Emit, depth: int) -> Reading[bool]:
    if depth >= MAX_DEPTH or not (yield from mark(source, "[", emit)):
        return False
    if (yield from mark(source, "]", emit)):
        return True
    while True:
        yield from _blanks(source, emit)
        if not (yield from read_value(source, emit, depth + 1)):
            return False
        if (yield from mark(source, "]", emit)):
            return True
        if not (yield from mark(source, ",", emit)):
            return False


def _blanks(source: Source, emit: Emit) -> Reading[None]:
    blanks = yield from source.blanks()
    if blanks:
        emit(blanks)


def _escape(source: Source, emit: Emit) -> Reading[bool]:
    """What follows a backslash."""
    char = yield from source.peek()
    if not char or char not in '"\\/bfnrtu':
        emit("\\")
        return False
    yield from source.literal(char)
    if char != "u":
        emit(f"\\{char}")
        return True
    return (yield from _code_unit(source, emit))


def _code_unit(source: Source, emit: Emit) -> Reading[bool]:
    """What follows `\\u`. Half of a surrogate pair alone becomes U+FFFD, unless the text ends with it."""
    digits = yield from source.text_of(_HEX, 3)
    while _FIRST_HALF.fullmatch(digits):
        if not (yield from source.literal("\\u")):
            cut_off = not (yield from source.peek())
            emit(f"\\u{digits}" if cut_off else _REPLACEMENT)
            return True
        second = yield from source.text_of(_HEX, 3)
        if _SECOND_HALF.fullmatch(second):
            emit(f"\\u{digits}\\u{second}")
            return True
        emit(_REPLACEMENT)
        digits = second
    emit(_REPLACEMENT if _SECOND_HALF.fullmatch(digits) else f"\\u{digits}")
    return len(digits) == 4
