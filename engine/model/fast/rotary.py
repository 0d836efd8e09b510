"""RoPE: cos and sin from a table; rotation, per-head norms and the KV write in one kernel.

`apply_rotary_pos_emb` is a global of a modeling file, which the attention's forward calls. Each fused attention module
gets that same forward with globals of its own, in which the function stores cos and sin for our attention function and
returns query and key unchanged. So nothing changes for other models in the process, whatever runs at the same time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.kv_write import HeadNorm, rope_kv_write
from engine.model import rope
from engine.model.attention import Angles, AttentionCall, FusedRotary, attend_within
from engine.model.fast.forwards import BLOCK_SIZE, UnpagedAttention, run_model
from engine.model.fast.norm import RmsNorm
from engine.model.fast.tally import Tally
from engine.model.fast.target import Target
from engine.model.tolerance import close

_NAME = "apply_rotary_pos_emb"
Form = Callable[[Tensor], Tensor]


def _halves(x: Tensor) -> Tensor:
    return torch.cat((x, x), dim=-1)


def _pairs(x: Tensor) -> Tensor:
    return x[:, : x.shape[1] // 2].repeat_interleave(2, dim=-1)


_FORMS: list[tuple[Form | None, bool]] = [(None, False), (None, True), (_halves, False), (_pairs, True)]
"""How transformers' cos and sin become ours, and `interleaved`: for most models, Cohere, gpt-oss and GLM, in this
order."""


def fuse_tables(target: Target, tally: Tally) -> None:
    """Look cos and sin up in tables (see `engine.model.rope`), where a forward of a few tokens shows that they are what
    the module returns. RoPE that depends on the batch has its tables already."""
    like = torch.empty(0, dtype=target.model.dtype, device=target.model.device)
    rotary = rope.rotary_modules(target.model)
    calls = _calls(target, [module for module in rotary if not rope.is_table(module)])
    for module in rotary:
        refusal = None
        if module in calls:
            table = _table(target, module, calls[module], like)
            if table is None:
                refusal = "takes no positions of a row, or returns something else"
            else:
                target.patches.set_forward(module, table)
        tally.add(type(module).__name__, refusal)


def _table(target: Target, rotary: nn.Module, calls: list[_Call], like: Tensor) -> Callable[..., Any] | None:
    """A table that agrees with the calls; None: there is none."""
    if not calls or any(call.positions.shape[:-1] != (1,) for call in calls):
        return None
    table = rope.table_forward(rotary, target.config, target.max_model_len, like)
    return table if all(call.agrees(table) for call in calls) else None


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a module that computes cos and sin, and what it returned."""

    arguments: Mapping[str, Any]
    returned: tuple[Tensor, Tensor]

    @property
    def positions(self) -> Tensor:
        positions: Tensor = self.arguments["position_ids"]
        return positions

    def agrees(self, table: Callable[..., tuple[Tensor, Tensor]]) -> bool:
        return all(close(*both) for both in zip(table(**self.arguments), self.returned, strict=True))


def _calls(target: Target, rotary: list[nn.Module]) -> dict[nn.Module, list[_Call]]:
    """The calls of these modules in a forward of a few tokens."""
    calls: dict[nn.Module, list[_Call]] = {module: [] for module in rotary}
    mark = target.patches.mark()
    for module in rotary:

        def watched(*values: Any, module: nn.Module = module, **named: Any) -> Any:
            returned = type(module).forward(module, *values, **named)
            names = inspect.signature(type(module).forward).parameters
            calls[module].append(_Call({**dict(zip(list(names)[1:], values, strict=False)), **named}, returned))
            return returned

        target.patches.set_forward(module, watched)
    if rotary:
        run_model(target, UnpagedAttention())
    target.patches.back_to(mark)
    return calls


def fuse_rotation(target: Target, tally: Tally) -> None:
    """Fuse attention modules that pass on exactly what apply_rotary_pos_emb returns, as a forward of a few tokens
    shows."""
    _fuse(target, tally, _plain_candidate)


def fuse_head_norms(target: Target, tally: Tally) -> None:
    """Fuse q_norm and k_norm over single heads, right before the rotation (Qwen3, Gemma 3), instead of
    `fuse_rotation`."""
    _fuse(target, tally, _normed_candidate)


def _fuse(target: Target, tally: Tally, make: Callable[[Target, nn.Module, Angles], _Candidate | None]) -> None:
    angles = Angles()
    tally.fused = sum(FusedRotary.of(module) is not None for module in target.layers)
    candidates = [make(target, module, angles) for module in target.layers if FusedRotary.of(module) is None]
    watched = {candidate.module: candidate for candidate in candidates if candidate is not None}
    if not watched:
        return
    names = {module: name for name, module in target.model.named_modules()}
    mark = target.patches.mark()
    for candidate in watched.values():
        candidate.watch(target)
    site = _RotationProbe(watched)
    run_model(target, site)
    target.patches.back_to(mark)
    for module, candidate in watched.items():
        if candidate.refusal is None:
            candidate.install(target)
        tally.add(names[module], candidate.refusal)


def _plain_candidate(target: Target, module: nn.Module, angles: Angles) -> _Candidate | None:
    rotate = _rotation_of(module)
    return None if rotate is None else _Candidate(module, rotate, angles)


def _normed_candidate(target: Target, module: nn.Module, angles: Angles) -> _Candidate | None:
    rotate = _rotation_of(module)
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    found = [target.norms.get(norm) for norm in norms if norm is not None]
    head_dim = getattr(module, "head_dim", None)
    if rotate is None or len(found) != 2 or found[0] is None or found[0] != found[1]:
        return None
    if any(norm.weight.shape != (head_dim,) for norm in norms):  # type: ignore[union-attr]
        return None
    return _Candidate(module, rotate, angles, norms, found[0])  # type: ignore[arg-type]


def _rotation_of(module: nn.Module) -> FunctionType | None:
    forward = inspect.unwrap(type(module).forward)
    rotate = forward.__globals__.get(_NAME)
    if _NAME not in forward.__code__.co_names or not isinstance(rotate, FunctionType):
        return None
    return rotate if list(inspect.signature(rotate).parameters)[:4] == ["q", "k", "cos", "sin"] else None


@dataclass(slots=True)
class _Candidate:
    """An attention module that may be fused. norms: q_norm and k_norm, and the norm that both compute.

    events: what the watched forward called, in order: "q_norm", "k_norm", and the arguments of the rotation.
    """

    module: nn.Module
    rotate: Callable[..., tuple[Tensor, Tensor]]
    angles: Angles
    norms: list[nn.Module] = field(default_factory=list)
    norm: RmsNorm | None = None
    refusal: str | None = "its attention was not called"
    form: tuple[Form | None, bool] | None = None
    events: list[Any] = field(default_factory=list)

    def watch(self, target: Target) -> None:
        """Skip the rotation and the norms, and record their calls."""

        def stash(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
            self.events.append((q, k, cos, sin))
            return q, k

        def note(name: str) -> Callable[[Tensor], Tensor]:
            return lambda x: self.events.append(name) or x  # type: ignore[func-returns-value]

        target.patches.set_forward(self.module, _with_rotation(self.module, stash))
        for name, module in zip(("q_norm", "k_norm"), self.norms, strict=False):
            target.patches.set_forward(module, note(name))

    def install(self, target: Target) -> None:
        assert self.form is not None
        angles, form, interleaved = self.angles, *self.form

        def stash(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
            if cos is not angles.source:
                angles.source = cos
                angles.cos, angles.sin = (cos[0], sin[0]) if form is None else (form(cos[0]), form(sin[0]))
            return q, k

        target.patches.set_forward(self.module, _with_rotation(self.module, stash))
        for module in self.norms:
            target.patches.set_forward(module, _identity)
        FusedRotary.set(self.module, FusedRotary(angles, interleaved, self.head_norm()))
        target.patches.undo.append(lambda: FusedRotary.set(self.module, None))

    def head_norm(self) -> HeadNorm | None:
        """The argument of `rope_kv_write`."""
        if self.norm is None:
            return None
        q_weight, k_weight = (norm.weight for norm in self.norms)
        assert isinstance(q_weight, Tensor)
        assert isinstance(k_weight, Tensor)
        return HeadNorm(q_weight, k_weight, self.norm.eps, self.norm.weight_offset, self.norm.round_once)


def _identity(x: Tensor) -> Tensor:
    return x


def _with_rotation(module: nn.Module, rotate: Callable[..., tuple[Tensor, Tensor]]) -> MethodType:
    """The module's own forward, with `apply_rotary_pos_emb` replaced by `rotate`."""
    forward = inspect.unwrap(type(module).forward)
    scope = {**forward.__globals__, _NAME: rotate}
    copy = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copy, module)


class _RotationProbe:
    """Compares the kernel with each layer's own rotation, and continues with the layer's own."""

    def __init__(self, watched: dict[nn.Module, _Candidate]) -> None:
        self._watched = watched

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        candidate = self._watched.get(module)
        if candidate is not None:
            call.query, call.key = self._compare(candidate, call)
        return attend_within(call)

    def _compare(self, candidate: _Candidate, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Returns the layer's own query and key; sets the candidate's form and refusal."""
        names, arguments = candidate.events[:-1], candidate.events[-1] if candidate.events else None
        candidate.events = []
        expected_norms = ["q_norm", "k_norm"] if candidate.norms else []
        if not isinstance(arguments, tuple) or names != expected_norms:
            candidate.refusal = "its norms are not right before the rotation" if candidate.norms else "does not rotate"
            return call.query, call.key
        q, k, cos, sin = arguments
        own = _own_rotation(candidate, q, k, cos, sin)
        same = _is_view(call.query, q) and _is_view(call.key, k) and cos.ndim == 3 and cos.shape[0] == 1
        form = next((form for form in _FORMS if _agrees(candidate, call, form, cos, sin, own)), None) if same else None
        candidate.form = form
        candidate.refusal = None if form else "differs" if same else "changes query or key after the rotation"
        return own


def _is_view(handed: Tensor, rotated: Tensor) -> bool:
    """Whether attention got what the rotation returned, which is [1, heads, num_tokens, head_dim]."""
    own = rotated[0].transpose(0, 1)
    return handed.data_ptr() == own.data_ptr() and handed.shape == own.shape and handed.stride() == own.stride()


def _own_rotation(candidate: _Candidate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if candidate.norms:
        q, k = (type(norm).forward(norm, x) for norm, x in zip(candidate.norms, (q, k), strict=True))
    q, k = candidate.rotate(q, k, cos, sin)
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


def _agrees(
    candidate: _Candidate,
    call: AttentionCall,
    form: tuple[Form | None, bool],
    cos: Tensor,
    sin: Tensor,
    own: tuple[Tensor, Tensor],
) -> bool:
    make, interleaved = form
    angles = [x[0] if make is None else make(x[0]) for x in (cos, sin)]
    num_tokens, num_kv_heads, head_dim = call.key.shape
    if angles[0].shape[1] > head_dim:
        return False
    query, key, value = call.query.clone(), call.key.clone(), call.value
    if value.shape != key.shape:
        return False
    cache = key.new_zeros((2, 2, num_kv_heads, BLOCK_SIZE, head_dim))
    slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + num_tokens, device=key.device)
    rope_kv_write(
        query,
        key,
        value,
        angles[0],
        angles[1],
        cache[:, 0],
        cache[:, 1],
        slots,
        interleaved=interleaved,
        norm=candidate.head_norm(),
    )
    written_key, written_value = (cache[1, i, :, :num_tokens].transpose(0, 1) for i in (0, 1))
    return close(query, own[0]) and close(written_key, own[1]) and bool((written_value == value).all())
