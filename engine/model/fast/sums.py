"""All-reduces that are fused into the norms after them: `baton_kernels.all_reduce_rms_norm`.

In a divided layer, o_proj and down_proj compute partial sums. Where attention returns the very tensor that its o_proj
computed, and the MLP that of its down_proj, only the norm that follows reads the sum. Then the modules return their
partial sums, and the norm sums them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from engine.model.fast.decoder import Decoder, Forward
from engine.model.fast.forwards import UnpagedAttention, run_model
from engine.model.fast.norm import Norm
from engine.model.fast.tally import Tally
from engine.model.fast.target import Target
from engine.model.linear_method import method_of
from engine.model.parallel.group import RankGroup
from engine.model.parallel.layers import RowParallelLinear


def fuse_sums(target: Target, tally: Tally) -> None:
    """Fuse the sums of attention modules and MLPs that end with a sum, as a forward of a few tokens shows."""
    decoder = target.decoder
    if decoder is None:
        return
    names = {module: name for name, module in target.model.named_modules()}
    attentions = [_find(target, names, attention) for attention in decoder.attentions]
    mlps = [_find(target, names, layer.mlp) for layer in decoder.layers]
    found = [candidate for pair in zip(attentions, mlps, strict=True) for candidate in pair if candidate is not None]
    if not found:
        return
    _watch(target, decoder, attentions, mlps)
    last = mlps[-1]
    if last is not None and decoder.final_norm is None and not decoder.parts[-1].is_sandwich:
        last.refusal = "no norm follows in this stage"
    for candidate in found:
        if not candidate.group.minimum(int(candidate.refusal is None)):
            candidate.refusal = candidate.refusal or "another rank refused it"
        else:
            target.patches.set_forward(candidate.linear, candidate.method.make_product_for_norm())
        tally.add(candidate.name, candidate.refusal)
    _sum_in_norms(decoder, attentions, mlps).install(target.patches)


@dataclass(slots=True)
class _Candidate:
    """A linear layer that returns partial sums. result: the last one."""

    name: str
    linear: nn.Module
    method: RowParallelLinear
    refusal: str | None = "it was not called"
    result: Tensor | None = None

    @property
    def group(self) -> RankGroup:
        return self.method.group

    def recorded(self) -> Callable[[Tensor], Tensor]:
        forward = self.linear.forward

        def record(x: Tensor) -> Tensor:
            self.result = forward(x)
            return self.result

        return record

    def watched(self, forward: Forward) -> Forward:
        """`forward`, which also sets the refusal: None if it returned this result, alone or as the first item of a
        tuple."""

        def watch(*given: Any, **named: Any) -> Any:
            found = forward(*given, **named)
            returned = found[0] if isinstance(found, tuple) else found
            self.refusal = None if returned is self.result else "more is done with the sum"
            return found

        return watch


def _find(target: Target, names: dict[nn.Module, str], owner: object) -> _Candidate | None:
    """The only linear layer in an attention module or MLP that returns partial sums; None: there is not exactly one."""
    modules = owner.modules() if isinstance(owner, nn.Module) else ()
    sums = [(module, method) for module in modules if isinstance(method := method_of(module), RowParallelLinear)]
    if len(sums) != 1 or sums[0][1] not in target.products:
        return None
    linear, method = sums[0]
    return _Candidate(names[linear], linear, method)


def _watch(
    target: Target, decoder: Decoder, attentions: list[_Candidate | None], mlps: list[_Candidate | None]
) -> None:
    """Run a forward, and record what it shows of the candidates."""
    mark = target.patches.mark()
    watched = []
    for parts, attention, mlp in zip(decoder.parts, attentions, mlps, strict=True):
        if attention is not None:
            target.patches.set_forward(attention.linear, attention.recorded())
            parts = replace(parts, attention=attention.watched(parts.attention))
        if mlp is not None:
            target.patches.set_forward(mlp.linear, mlp.recorded())
            parts = replace(parts, mlp=mlp.watched(parts.mlp))
        watched.append(parts)
    replace(decoder, parts=watched).install(target.patches)
    run_model(target, UnpagedAttention())
    target.patches.back_to(mark)


def _sum_in_norms(decoder: Decoder, attentions: list[_Candidate | None], mlps: list[_Candidate | None]) -> Decoder:
    """The decoder with norms that sum the results of the candidates that were not refused."""
    norms = [list(parts.norms) for parts in decoder.parts]
    final = [] if decoder.final_norm is None else [decoder.final_norm]
    for index, parts in enumerate(decoder.parts):
        _sum(norms[index], 1, attentions[index])
        if parts.is_sandwich:
            _sum(norms[index], 3, mlps[index])
        else:
            _sum((*norms, final)[index + 1], 0, mlps[index])
    layers = [replace(parts, norms=own) for parts, own in zip(decoder.parts, norms, strict=True)]
    return replace(decoder, parts=layers, final_norm=final[0] if final else None)


def _sum(norms: list[Norm], index: int, candidate: _Candidate | None) -> None:
    if candidate is not None and candidate.refusal is None:
        norms[index] = norms[index]._replace(sums=candidate.group)
