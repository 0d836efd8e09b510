"""The logits processors that packages offer, found by their metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import InvalidRequest
from baton.logits_processors import LogitsProcessor
from engine.logits_processor import ProcessorFailed
from node.logits_processors import LogitsProcessors

PLUGIN = Path(__file__).parents[1] / "logits_processors_plugin"


def package(folder: Path, entry: str) -> None:
    """Install a package with this entry point, which has the module `theirs`."""
    metadata = folder / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[baton.logits_processors]\n{entry}\n")
    (folder / "theirs.py").write_text("number = 7\n")


def test_those_of_installed_packages_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    chain = LogitsProcessors.installed().chain([LogitsProcessor("forced", '{"args":[[3]],"kwargs":{"logit":2.5}}')])
    assert chain is not None
    logits = chain((1, 2), (), torch.zeros(5))
    assert logits.tolist() == [-torch.inf] * 3 + [2.5] + [-torch.inf]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("bad = theirs:absent", "bad of theirs:absent cannot be loaded: AttributeError"),
        ("bad = absent:thing", "bad of absent:thing cannot be loaded: ModuleNotFoundError"),
        ("bad = theirs:number", "bad: theirs:number cannot be called"),
    ],
)
def test_one_that_cannot_be_loaded_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, text: str
) -> None:
    package(tmp_path, entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=f"^logits processor {text}"):
        LogitsProcessors.installed()


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("frob", "", "none called 'frob'; it has one, scaled, three"),
        ("scaled", "[]", "scaled: arguments must be a JSON object"),
        ("scaled", "[" * 10_000, "scaled: arguments must be a JSON object"),
        ("scaled", '{"by": 2}', "`args` and `kwargs`, not 'by'"),
        ("scaled", '{"args": 2}', "args must be a list"),
        ("scaled", '{"kwargs": []}', "kwargs must be an object"),
        ("scaled", '{"args": [1, 2]}', "scaled refuses its arguments: TypeError"),
        ("one", "", "one makes a function of 1 arguments, not of 2 or 3"),
    ],
)
def test_what_cannot_be_made_is_refused(name: str, arguments: str, text: str) -> None:
    known: dict[str, Any] = {
        "scaled": scaled,
        "one": lambda: abs,
        "three": lambda: lambda prompt, output, logits: logits,
    }
    with pytest.raises(InvalidRequest, match=text) as refused:
        LogitsProcessors(known).chain([LogitsProcessor(name, arguments)])
    assert refused.value.param == "logits_processors"


def scaled(by: float = 2.0) -> Callable[[list[int], Tensor], Tensor]:
    def scale(output: list[int], logits: Tensor) -> Tensor:
        return logits * by + len(output)

    return scale


def test_each_gets_what_the_one_before_it_gave_and_fp32_of_the_right_shape() -> None:
    registry = LogitsProcessors({"scaled": scaled, "half": lambda: lambda output, logits: logits.half()[..., :]})
    wanted = [LogitsProcessor("scaled"), LogitsProcessor("half"), LogitsProcessor("scaled", '{"args": [3]}')]
    chain = registry.chain(wanted)
    assert chain is not None
    logits = chain((), (8, 9), torch.ones(4))
    assert (logits.dtype, logits.tolist()) == (torch.float32, [14.0] * 4)
    narrow = LogitsProcessors({"cut": lambda: lambda output, logits: logits[:2]}).chain([LogitsProcessor("cut")])
    assert narrow is not None
    with pytest.raises(ProcessorFailed, match="cut returned logits of shape"):
        narrow((), (), torch.ones(4))


@pytest.mark.parametrize("give", [lambda logits: logits.numpy(), lambda logits: logits.to("meta")])
def test_what_is_no_tensor_with_values_fails_as_what_is_raised_does(give: Callable[[Tensor], object]) -> None:
    chain = LogitsProcessors({"odd": lambda: lambda output, logits: give(logits)}).chain([LogitsProcessor("odd")])
    assert chain is not None
    with pytest.raises(ProcessorFailed, match="odd failed: "):
        chain((), (), torch.ones(4))


def test_what_is_sparse_is_made_dense() -> None:
    known = {"sparse": lambda: lambda output, logits: logits.to_sparse()}
    chain = LogitsProcessors(known).chain([LogitsProcessor("sparse")])
    assert chain is not None
    own = torch.tensor([0.0, 2.0])
    assert own.clone().copy_(chain((), (), own)).tolist() == [0.0, 2.0]


def test_without_names_there_is_no_chain() -> None:
    assert LogitsProcessors({}).chain([]) is None
