"""A process that compiles JSON schemas and walks instances, for `structured_schemas`: it can be killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
from llguidance import LLTokenizer

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from node.structured_output.grammar_state import Backend, GrammarState

START_S = 120.0
WALK_S = 30.0
"""For all instances of a schema."""
REPEATS = 3
"""Of a compilation, while they take no longer than REPEATS_S together: the median counts."""
REPEATS_S = 0.2
COMPACT, SPACED = (",", ":"), (", ", ": ")


@dataclass(frozen=True, slots=True)
class Asked:
    """A schema, and instances, each with whether it is valid."""

    schema: Any
    instances: list[tuple[bool, Any]]


@dataclass(frozen=True, slots=True)
class Compiled:
    seconds: float
    error: str | None = None


@dataclass(slots=True)
class Walked:
    """accepted: by validity, whether each instance was accepted in the compact and in the spaced form."""

    accepted: dict[bool, list[tuple[bool, bool]]] = field(default_factory=lambda: {True: [], False: []})
    mask_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """A process waits for schemas."""

    pid: int
    base_bytes: int


class SchemaWorker:
    """Owns the processes: one that has loaded the backend, and its child, which is forked again when it was killed."""

    def __init__(self, name: str, tokenizer: Path, vocab_size: int, compile_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._compile_s = compile_s
        self._pipe, theirs = context.Pipe()
        self._loaded = context.Process(target=_serve, args=(theirs, name, tokenizer, vocab_size))
        self._loaded.start()
        theirs.close()
        self._ready = self._next_ready()

    @property
    def base_bytes(self) -> int:
        """Of the process before any schema."""
        return self._ready.base_bytes

    def ask(self, asked: Asked) -> tuple[Compiled | None, Walked | None]:
        """None for what took too long, or ended the process."""
        self._pipe.send(asked)
        compiled = self._next(self._compile_s)
        if not isinstance(compiled, Compiled) or compiled.error is not None:
            return compiled, None
        return compiled, self._next(WALK_S)

    def close(self) -> None:
        self._loaded.kill()
        self._loaded.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._ready.pid, signal.SIGKILL)
        self._pipe.close()

    def _next(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            os.kill(self._ready.pid, signal.SIGKILL)
            self._ready = self._next_ready()
            return None
        answer = self._pipe.recv()
        if isinstance(answer, Ready):  # its predecessor ended by itself
            self._ready = answer
            return None
        return answer

    def _next_ready(self) -> Ready:
        """Passes over what the killed one may still have said."""
        while self._pipe.poll(START_S):
            if isinstance(answer := self._pipe.recv(), Ready):
                return answer
        raise RuntimeError(f"no process is ready within {START_S:g} s")


def _serve(pipe: Connection, name: str, tokenizer: Path, vocab_size: int) -> None:
    """Load, then have a child do the work."""
    text = tokenizer.read_text()
    eos = vocab_size - 1
    backend, walker = BACKENDS[name](text, vocab_size, [eos]), _Walker(text, vocab_size, eos)
    while True:
        if not (child := os.fork()):
            _work(pipe, backend, walker)
        os.waitpid(child, 0)


def _work(pipe: Connection, backend: Backend, walker: _Walker) -> NoReturn:
    pipe.send(Ready(os.getpid(), _resident_bytes()))
    while True:
        asked = pipe.recv()
        state, compiled = _compile(backend, json.dumps(asked.schema))
        pipe.send(compiled)
        if state is not None:
            pipe.send(walker.walk_all(state, asked))


def _compile(backend: Backend, text: str) -> tuple[GrammarState | None, Compiled]:
    structured = StructuredOutput(StructuredKind.JSON, text)
    took = list[float]()
    state: GrammarState | None = None
    while len(took) < REPEATS and sum(took) * (1 + 1 / max(len(took), 1)) < REPEATS_S:
        began = time.perf_counter()
        try:
            state = backend.compile(structured)
        except (ValueError, InvalidRequest) as error:
            return None, Compiled(time.perf_counter() - began, str(error))
        took.append(time.perf_counter() - began)
    return state, Compiled(sorted(took)[len(took) // 2])


class _Walker:
    """Follows instances token by token: of the vocabulary, always the longest token that fits."""

    def __init__(self, tokenizer: str, vocab_size: int, eos: int) -> None:
        self._tokens = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=[eos])
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._eos = eos

    def walk_all(self, state: GrammarState, asked: Asked) -> Walked:
        walked = Walked()
        for valid, data in asked.instances:
            texts = (json.dumps(data, separators=form, ensure_ascii=False) for form in (COMPACT, SPACED))
            compact, spaced = (self._accepts(state.copy(), text, walked.mask_s) for text in texts)
            walked.accepted[valid].append((compact, spaced))
        walked.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return walked

    def _accepts(self, state: GrammarState, text: str, mask_s: list[float]) -> bool:
        """Whether all tokens are accepted, and the output may then end."""
        for token in self._tokens.greedy_tokenize(text):
            self._mask[:] = 0
            began = time.perf_counter()
            state.fill(self._mask)
            mask_s.append(time.perf_counter() - began)
            state.accept([token])
            if state.error is not None:
                return False
        if state.finished:
            return True
        state.accept([self._eos])
        return state.error is None


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _guidance(tokenizer: str, vocab_size: int, eos: list[int]) -> Backend:
    from node.structured_output.guidance_states import GuidanceBackend

    return GuidanceBackend(tokenizer, vocab_size, eos)


def _xgrammar(tokenizer: str, vocab_size: int, eos: list[int]) -> Backend:
    from node.structured_output.xgrammar_states import XgrammarBackend

    return XgrammarBackend(tokenizer, vocab_size, eos)


def _unchecked(tokenizer: str, vocab_size: int, eos: list[int]) -> Backend:
    """XGrammar without the refusals of `xgrammar_schema`, as other servers use it."""
    mock.patch("baton.structured_output.xgrammar_compiler.why_unsupported", return_value=None).start()
    return _xgrammar(tokenizer, vocab_size, eos)


BACKENDS = {"guidance": _guidance, "xgrammar": _xgrammar, "xgrammar, unchecked": _unchecked}
