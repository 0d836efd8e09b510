"""cos and sin from a table over positions, made once by the model's own module: exact, and the same for any batch.

transformers computes them anew in each forward, in about eight small kernels, and for two types takes the frequencies
from the longest sequence of the batch: longrope (Phi-3) has short and long factors, dynamic NTK a base that grows.
With these, another sequence of the batch would change a request's result, and cached keys would not match later
queries. The table holds every position as transformers computes it for a sequence of `max_model_len` tokens:

- longrope: the long factors when max_model_len is above original_max_position_embeddings, else the short ones, as in
  vLLM (`Phi3LongRoPEScaledRotaryEmbedding`).
- dynamic: the base of a sequence of max_model_len tokens; up to max_position_embeddings that is plain RoPE. vLLM
  (`DynamicNTKScalingRotaryEmbedding`) always takes max_position_embeddings * factor, which is our default
  max_model_len (`Checkpoint.max_model_len`).

Nodes that hand KV to one another must have made the same choice: `variant` is part of the model's fingerprint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.errors import UnsupportedModel

BATCH_DEPENDENT = frozenset({"dynamic", "longrope"})

_CHUNK = 8192
_SPARE_ROWS = 64
"""A step that runs ahead may compute tokens past the last position. It must not fail; the results are dropped."""


def batch_dependent_types(config: Any) -> list[str]:
    """The RoPE types of a text config, ordered by name, that take their frequencies from the whole batch."""
    return sorted(BATCH_DEPENDENT & set(_types(getattr(config, "rope_parameters", None))))


def variant(config: Any, max_model_len: int) -> str:
    """What `max_model_len` decides about a text config's RoPE; "" for most. Nodes with equal variants share KV."""
    chosen = []
    for parameters in _sets(getattr(config, "rope_parameters", None)):
        if parameters["rope_type"] == "longrope":
            original = parameters["original_max_position_embeddings"]
            chosen.append("longrope long" if max_model_len > original else "longrope short")
        elif parameters["rope_type"] == "dynamic":
            chosen.append(f"dynamic {max(max_model_len, config.max_position_embeddings)}")
    return ", ".join(chosen)


def context_length(config: Any, stated: int) -> int:
    """For how many tokens a text config's RoPE is meant. stated: max_position_embeddings. With dynamic NTK, its factor
    times as many; YaRN's factor is of the length before it, of which `stated` may (gpt-oss) or may not (Qwen2.5) be the
    multiple. That of linear scaling says no such length, and most models' `stated` is the multiple (Gemma 3)."""
    lengths = list[float]()
    for one in _sets(getattr(config, "rope_parameters", None)):
        factor = one.get("factor")
        if one["rope_type"] == "dynamic":
            lengths.append(stated * float(one["factor"]))
        elif one["rope_type"] == "yarn" and factor is not None:
            lengths.append(max(stated, one.get("original_max_position_embeddings", stated) * float(factor)))
    return int(min(lengths, default=stated))


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that compute cos and sin from positions."""
    return [module for module in model.modules() if hasattr(module, "rope_type") and _takes_positions(module)]


def is_table(rotary: nn.Module) -> bool:
    return hasattr(rotary.forward, "baton_table")


def table_forward(rotary: nn.Module, config: Any, max_model_len: int, like: Tensor) -> Callable[..., Any]:
    """A forward for the module that looks cos and sin up, each a view [1, num_tokens, rotary_dim].

    like: any tensor of the model's dtype on its device. The tables take 2 * rotary_dim numbers a position; models with
    several sets of parameters (Gemma 3) have one table for each. Raises UnsupportedModel.
    """
    assert not is_table(rotary)
    kinds: list[str | None] = [None]
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        kinds = sorted(kind for kind in set(config.layer_types) if config.rope_parameters[kind])  # some do not rotate
    tables = {kind: _table(rotary, kind, max_model_len, like) for kind in kinds}

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        if position_ids.ndim != 2:
            raise ValueError("its RoPE has several positions for each token, and no tables")
        cos, sin = torch.embedding(tables[layer_type], position_ids).chunk(2, dim=-1)
        return cos, sin

    forward.baton_table = True  # type: ignore[attr-defined]
    return forward


@torch.no_grad()
def _table(rotary: nn.Module, kind: str | None, max_model_len: int, like: Tensor) -> Tensor:
    """[positions, 2 * rotary_dim], cos before sin, in the dtype that the module returns."""
    last = max_model_len - 1
    extra = {} if kind is None else {"layer_type": kind}
    pieces = []
    for start in range(0, max_model_len + _SPARE_ROWS, _CHUNK):
        rows = torch.arange(start, min(start + _CHUNK, max_model_len + _SPARE_ROWS), device=like.device)
        # Every piece includes the last position, from which longrope and dynamic NTK choose their frequencies.
        positions = torch.cat([rows.clamp(max=last), rows.new_tensor([last])])
        computed = rotary(like, positions[None], **extra)
        if isinstance(computed, Tensor):
            raise UnsupportedModel(f"{type(rotary).__name__}: it gives complex numbers that depend on the batch")
        cos, sin = computed
        pieces.append(torch.cat([cos[0, :-1], sin[0, :-1]], dim=-1))
    return torch.cat(pieces)


def _takes_positions(module: nn.Module) -> bool:
    names = list(inspect.signature(module.forward).parameters)
    return names[:2] == ["x", "position_ids"] and set(names[2:]) <= {"layer_type"}


def _types(parameters: Any) -> list[str]:
    return [one["rope_type"] for one in _sets(parameters)]


def _sets(parameters: Any) -> list[dict[str, Any]]:
    """All sets of RoPE parameters; some models have one for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [found for value in parameters.values() for found in _sets(value)]
    return nested + ([parameters] if "rope_type" in parameters else [])
