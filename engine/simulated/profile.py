"""How long the steps and transfers of a real node take: the file of `--profile`.

[step]            a step with only decodes, in microseconds
[prompt_step]     a step with prompt tokens, which never takes less time than its decodes alone
[mixed_step]      a step with prompt tokens and decodes; without this table, [prompt_step] holds
[spread]          by how much steps take longer or shorter than that; without this table, they do not
[link]            the link that carries KV between nodes
[model]           the shape of the KV, and the longest context
[node]            the sizes of a node, where no flag says otherwise
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from baton.layout import KvLayout, LayerKv
from engine.step_size import StepSize

EMBEDDED = Path(__file__).parent / "profiles"
_US = 1e-6

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The microseconds that a step takes, as a function of its `StepSize`; no number is negative."""

    constant_us: float
    per_seq_us: float = 0.0
    per_context_token_us: float = 0.0
    per_prompt_token_us: float = 0.0
    per_prompt_pair_us: float = 0.0

    def seconds(self, size: StepSize) -> float:
        return _US * (
            self.constant_us
            + self.per_seq_us * size.num_seqs
            + self.per_context_token_us * size.num_context_tokens
            + self.per_prompt_token_us * size.num_prompt_tokens
            + self.per_prompt_pair_us * size.num_prompt_pairs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost(StepCost):
    """`per_adopted_seq_us`: for each sequence that the step is the first to decode here, after a handoff. Its row is
    uploaded, its last blocks are copied beside the step, and the host has only the rest of the step before to prepare
    it: the launch is late, and the device idles for the difference."""

    per_adopted_seq_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Factors of the times of steps without and with prompt tokens, each as likely as the others."""

    step: tuple[float, ...] = (1.0,)
    prompt_step: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """`bandwidth_gb_s`: total GB/s that a node sends, or receives. `latency_us`: of a message between two processes,
    including the work of both ends."""

    bandwidth_gb_s: float
    latency_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The KV that the model's layers store, see `LayerKv`, and the model's context length in tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSizes:
    """See EngineConfig. `layer_groups`: in how many groups of layers the KV of a prompt's last chunk is sent."""

    num_blocks: int
    max_num_seqs: int = 256
    layer_groups: int = 1
    async_scheduling: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The contents of a profile. `source`: where the numbers come from, for people."""

    source: str
    step: DecodeCost
    prompt_step: StepCost
    link: LinkCost
    model: ModelShape
    node: NodeSizes
    mixed_step: StepCost | None = None
    spread: Spread = Spread()
    name: str = field(default="", compare=False)

    def spread_of(self, size: StepSize) -> tuple[float, ...]:
        """The factors of the step's time."""
        return self.spread.prompt_step if size.has_prompts else self.spread.step

    def step_s(self, size: StepSize, num_adopted: int = 0) -> float:
        """How long the step takes, in seconds, if it is the first of so many sequences that were handed over; without
        its spread."""
        adopted_s = _US * self.step.per_adopted_seq_us * num_adopted
        if not size.has_prompts:
            return adopted_s + self.step.seconds(size)
        cost = self.mixed_step if self.mixed_step and size.num_context_tokens else self.prompt_step
        return adopted_s + max(self.step.seconds(size), cost.seconds(size))

    def layout(self, block_size: int, fingerprint: str) -> KvLayout:
        shape = self.model
        layer = LayerKv(shape.num_kv_heads, shape.head_dim, shape.head_dim, shape.dtype)
        return KvLayout((layer,) * shape.num_layers, block_size, fingerprint)


def load_profile(name: str) -> Profile:
    """The profile in a file, or the embedded one of that name. Raises ValueError with a line for the user."""
    path = Path(name)
    embedded = EMBEDDED / f"{name}.toml"
    if not path.is_file() and embedded.is_file():
        path = embedded
    try:
        stated = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in EMBEDDED.glob("*.toml")))
        raise ValueError(f"--profile {name}: {error.strerror}; profiles that come with baton: {known}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--profile {name}: not TOML: {error}") from None
    try:
        return _profile(stated, path.stem)
    except ValueError as error:
        raise ValueError(f"--profile {name}: {error}") from None


def _profile(stated: Mapping[str, Any], name: str) -> Profile:
    """Raises ValueError."""
    tables: dict[str, type[Any]] = {"step": DecodeCost, "prompt_step": StepCost, "mixed_step": StepCost}
    tables |= {"spread": Spread, "link": LinkCost, "model": ModelShape, "node": NodeSizes}
    if unknown := sorted(stated.keys() - tables.keys() - {"source"}):
        raise ValueError(f"unknown: {', '.join(unknown)}")
    for optional in {"mixed_step", "spread"} - stated.keys():
        del tables[optional]
    read: dict[str, Any] = {key: _table(kind, key, stated.get(key)) for key, kind in tables.items()}
    profile = Profile(source=str(stated.get("source", "")), name=name, **read)
    profile.layout(1, "")  # raises for a shape that no model has
    if profile.link.bandwidth_gb_s <= 0:
        raise ValueError("link.bandwidth_gb_s must be more than 0")
    return profile


def _table(kind: type[T], name: str, stated: object) -> T:
    """Raises ValueError for a missing or unknown entry, and for one that is negative or of a wrong type."""
    if not isinstance(stated, dict):
        raise ValueError(f"lacks the table [{name}]")
    known = {entry.name: str(entry.type) for entry in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(stated.keys() - known.keys()):
        raise ValueError(f"{name}: unknown: {', '.join(unknown)}")
    for key, value in stated.items():
        _check(f"{name}.{key}", known[key], value)
    needed = {entry.name for entry in fields(kind) if entry.default is MISSING}  # type: ignore[arg-type]
    if missing := sorted(needed - stated.keys()):
        raise ValueError(f"{name}: lacks {', '.join(missing)}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()})


def _check(name: str, kind: str, value: object) -> None:
    if kind == "tuple[float, ...]":
        if not isinstance(value, list) or not value:
            raise ValueError(f"{name} must be a list of numbers, not {value!r}")
        for number in value:
            _check(name, "float", number)
        return
    right = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}[kind]
    if not isinstance(value, right) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name} must be of type {kind}, not {value!r}")
    if kind in ("int", "float") and not 0 <= value < float("inf"):  # type: ignore[operator]
        raise ValueError(f"{name} must be 0 or more, not {value}")
