"""All-reduces that are fused into the norms after them: `baton_kernels.all_reduce_rms_norm`.

In a divided layer, o_proj and down_proj compute partial sums, and so does a block of experts. Where attention returns
the very tensor that its o_proj computed, and the MLP that of its down_proj, or is a block of experts, only the norm
that follows reads the sum. Then they return their partial sums, and the norm sums them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from engine.model.fast.decoder import Decoder, Forward
from engine.model.fast.forwards import UnpagedAttention, run_model
from engine.model.fast.norm import Norm
from engine.model.fast.patches import Patches
from engine.model.fast.tally import Tally
from engine.model.fast.target import Summed, Target
from engine.model.linear_method import method_of
from engine.model.parallel.experts import BlockSum
from engine.model.parallel.group import NormSums
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
        if not candidate.ranks.minimum(int(candidate.refusal is None)):
            candidate.refusal = candidate.refusal or "another rank refused it"
        tally.add(candidate.name, candidate.refusal)
    in_norms = _without_sums(target.patches, _sum_in_norms(decoder, attentions, mlps), attentions, mlps)
    in_norms.install(target.patches)
    target.decoder = in_norms
    if len(found) == 2 * len(decoder.layers) and all(candidate.refusal is None for candidate in found):
        target.summed = Summed(found[0].ranks, [attention.module for attention in attentions if attention is not None])


@dataclass(slots=True)
class _Candidate:
    """What ends an attention module or an MLP with a sum over ranks. for_norm: the module's forward without the sum.
    result: the last one."""

    name: str
    module: nn.Module
    ranks: NormSums
    for_norm: Forward
    refusal: str | None = "it was not called"
    result: Tensor | None = None

    def watched(self, forward: Forward, patches: Patches) -> Forward:
        """The forward of the attention module or MLP, which also sets the refusal: None if it returned this result,
        alone or as the first item of a tuple."""
        own = self.module.forward

        def record(x: Tensor) -> Tensor:
            self.result = own(x)
            return self.result

        def watch(*given: Any, **named: Any) -> Any:
            found = forward(*given, **named)
            returned = found[0] if isinstance(found, tuple) else found
            self.refusal = None if returned is self.result else "more is done with the sum"
            return found

        patches.set_forward(self.module, record)
        return watch

    def without_sum(self, forward: Forward, patches: Patches) -> Forward:
        """The forward of the attention module or MLP, which now returns this rank's part of the sum."""
        patches.set_forward(self.module, self.for_norm)
        return forward


class _Block(_Candidate):
    """An MLP that is a block of experts."""

    def watched(self, forward: Forward, patches: Patches) -> Forward:
        self.refusal = None  # the sum is the last thing that it does
        return forward

    def without_sum(self, forward: Forward, patches: Patches) -> Forward:
        return self.for_norm


def _find(target: Target, names: dict[nn.Module, str], owner: object) -> _Candidate | None:
    """A block of experts, or the only linear layer in an attention module or MLP that returns partial sums; None: there
    is not exactly one."""
    if not isinstance(owner, nn.Module):
        return None
    block = BlockSum.of(owner)
    if block is not None and block.sums is not None:
        return _Block(names[owner], owner, block.sums, block.forward_for_norm)
    methods = [(module, method_of(module)) for module in owner.modules()]
    sums = [(module, method) for module, method in methods if isinstance(method, RowParallelLinear)]
    if len(sums) != 1 or sums[0][1] not in target.products:
        return None
    linear, method = sums[0]
    return _Candidate(names[linear], linear, method.group, method.make_product_for_norm())


def _watch(
    target: Target, decoder: Decoder, attentions: list[_Candidate | None], mlps: list[_Candidate | None]
) -> None:
    """Run a forward, and record what it shows of the candidates."""
    mark = target.patches.mark()
    _changed(decoder, attentions, mlps, lambda one, forward: one.watched(forward, target.patches)).install(
        target.patches
    )
    run_model(target, UnpagedAttention())
    target.patches.back_to(mark)


def _without_sums(
    patches: Patches, decoder: Decoder, attentions: list[_Candidate | None], mlps: list[_Candidate | None]
) -> Decoder:
    """The decoder whose attention modules and MLPs return partial sums, where the candidates were not refused."""

    def without_sum(candidate: _Candidate, forward: Forward) -> Forward:
        return forward if candidate.refusal is not None else candidate.without_sum(forward, patches)

    return _changed(decoder, attentions, mlps, without_sum)


def _changed(
    decoder: Decoder,
    attentions: list[_Candidate | None],
    mlps: list[_Candidate | None],
    change: Callable[[_Candidate, Forward], Forward],
) -> Decoder:
    """The decoder with changed forwards of those attention modules and MLPs that have candidates."""
    changed = []
    for parts, attention, mlp in zip(decoder.parts, attentions, mlps, strict=True):
        if attention is not None:
            parts = replace(parts, attention=change(attention, parts.attention))
        if mlp is not None:
            parts = replace(parts, mlp=change(mlp, parts.mlp))
        changed.append(parts)
    return replace(decoder, parts=changed)


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
        norms[index] = norms[index]._replace(sums=candidate.ranks)
