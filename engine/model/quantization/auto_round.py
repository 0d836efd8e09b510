"""AutoRound (Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", 2023): 4 or 8 bits, whose files are
those of GPTQ or AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.errors import UnsupportedModel
from engine.model.linear_method import Quantization
from engine.model.quantization.awq import Awq
from engine.model.quantization.gptq import Gptq
from engine.model.safetensors_index import StoredTensor

_FORMS: dict[str, type[Gptq] | type[Awq]] = {"auto_round:auto_gptq": Gptq, "auto_round:auto_awq": Awq}
"""By `packing_format`: the format of the files. AutoRound's GPTQ is of the `checkpoint_format` gptq."""
_UNQUANTIZED_BITS = 16


def auto_round(stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> Quantization:
    """The format of the files. Raises UnsupportedModel for others, and for layers with another type, or in files of AWQ
    with other sizes, than the rest; those that have 16 bits are not quantized, as the files show."""
    form = str(stated.get("packing_format"))
    if form not in _FORMS or stated.get("data_type", "int") != "int":
        of = f"packing_format {form} of {stated.get('data_type', 'int')}"
        raise UnsupportedModel(f"AutoRound's {of}: only {' and '.join(_FORMS)} of int can be run")
    rules = stated.get("extra_config") or {}
    quantized = {name: own for name, own in rules.items() if _bits(own, stated) < _UNQUANTIZED_BITS}
    same = ("data_type",) if _FORMS[form] is Gptq else ("data_type", "bits", "group_size", "sym")
    for name, own in quantized.items():
        if differing := [kind for kind in same if kind in own and own[kind] != stated.get(kind, own[kind])]:
            raise UnsupportedModel(f"AutoRound's {form} with a {differing[0]} of its own for {name} (extra_config)")
    return _FORMS[form]({**stated, "dynamic": quantized}, stored)


def _bits(own: Mapping[str, Any], stated: Mapping[str, Any]) -> int:
    return int(own.get("bits") or stated.get("bits") or 4)
