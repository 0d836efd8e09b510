"""What a sequence carries beside tokens reaches the model's forward, whatever batch each token is computed in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.attention import IMPLEMENTATION
from engine.model.batch import BatchSize, DeviceState, _cut, pack, unpack
from engine.model.runner import TorchModelRunner
from engine.sequence import Sequence
from engine.step import Begun, Chunk, LaunchedStep
from tests.engine import tiny_models

torch.set_num_threads(1)

CONFIG = EngineConfig(
    num_blocks=17, max_model_len=60, vocab_size=tiny_models.VOCAB_SIZE, block_size=4, max_num_batched_tokens=10
)
MAX_TOKENS = 20


class BiasIds:
    """A bias for each token: of the value's two numbers the second holds from the tenth position on."""

    name, width, dtype = "bias_ids", 1, np.dtype(np.int32)

    def fill(self, chunk: Chunk, out: NDArray[Any]) -> None:
        first, second = chunk.sequence.extensions.get(self.name, (0, 0))
        out[:, 0] = [first if position < 10 else second for position in range(chunk.start, chunk.end)]

    def argument(self, values: Tensor) -> Tensor:
        return values[None, :, 0]


class Axes:
    """Row and column of each token, in lines as long as the value."""

    name, width, dtype = "axes", 2, np.dtype(np.float32)

    def fill(self, chunk: Chunk, out: NDArray[Any]) -> None:
        if line := chunk.sequence.extensions.get(self.name):
            out[:, 0], out[:, 1] = np.divmod(np.arange(chunk.start, chunk.end), line)

    def argument(self, values: Tensor) -> Tensor:
        return values.T[:, None]


EXTENSIONS = (BiasIds(), Axes())


class Biased(LlamaForCausalLM):
    """Adds to each token's embedding what its bias and its axes say, so that its KV depends on them."""

    def forward(
        self, input_ids: Tensor, bias_ids: Tensor | None = None, axes: Tensor | None = None, **others: Any
    ) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(9, embeds.shape[-1], generator=generator)
        if bias_ids is not None:
            assert bias_ids.shape == input_ids.shape
            embeds = embeds + table[bias_ids]
        if axes is not None:
            assert axes.shape == (2, *input_ids.shape)
            embeds = embeds + (axes / 10).permute(1, 2, 0) @ table[:2]
        return super().forward(inputs_embeds=embeds, **others)


class Recording(TorchModelRunner):
    """Remembers how long the chunks of each batch were."""

    def launch(self, chunks: Seq[Chunk], begun: Begun = lambda waited_s: None) -> LaunchedStep:
        self.batches = [*getattr(self, "batches", []), [chunk.length for chunk in chunks]]
        return super().launch(chunks, begun)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


def sequences() -> list[Sequence]:
    """All of the same tokens, of which each has something else beside them, or nothing."""
    prompt = tuple((7 * i + 3) % tiny_models.VOCAB_SIZE for i in range(17))
    carried: list[dict[str, Any]] = [{"bias_ids": (1, 2)}, {"axes": 5}, {}, {"bias_ids": (0, 8), "axes": 3}]
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return [
        Sequence(
            AttemptId(1, str(number), 0),
            [0, 1] if number == 3 else [0],
            prompt,
            sampling,
            cache_salt=str(extensions),
            arrived_s=float(number),
            extensions=extensions,
        )
        for number, extensions in enumerate(carried)
    ]


def alone(model: Biased, seq: Sequence) -> list[int]:
    """What the model says by itself, over all tokens anew each time."""
    tokens = list(seq.prompt_tokens)
    for _ in range(MAX_TOKENS):
        whole = Sequence(seq.attempt_id, [0], tuple(tokens), seq.sampling, extensions=seq.extensions)
        arguments = {}
        for extension in EXTENSIONS:
            values = np.zeros((len(tokens), extension.width), extension.dtype)
            extension.fill(Chunk.of(whole, 0, len(tokens)), values)
            arguments[extension.name] = extension.argument(torch.from_numpy(values))
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False, **arguments).logits[0, -1].argmax()))
    return tokens[len(seq.prompt_tokens) :]


@pytest.mark.parametrize("ahead", [False, True])
def test_each_token_has_its_own_in_mixed_batches_after_preemption_and_in_forks(folder: Path, ahead: bool) -> None:
    reference = Biased.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model = Biased.from_pretrained(folder, dtype=torch.float32, attn_implementation=IMPLEMENTATION).eval()
    config = dataclasses.replace(CONFIG, async_scheduling=ahead)
    runner = Recording(model, config, extensions=EXTENSIONS)
    engine = Engine(config, runner)
    seqs = sequences()
    for seq in seqs:
        engine.add(seq)
    said: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for sampled in engine.compute(engine.schedule(0.0)).sampled:
            said.setdefault((sampled.sequence.attempt_id.request_id, sampled.sample), []).append(sampled.token)
        engine.check_integrity()
    expected = {(seq.attempt_id.request_id, sample): alone(reference, seq) for seq in seqs for sample in seq.samples}
    assert said == expected
    assert len({tuple(output) for output in said.values()}) == len(seqs), "what they carry makes no difference"
    assert engine.num_preemptions
    assert any(1 in batch and max(batch) > 1 for batch in runner.batches)


def test_a_graphs_static_input_holds_it_too() -> None:
    """In its place, and zeros where nobody is."""
    (seq, axes, plain, _), state = sequences(), torch.zeros(9, 15, dtype=torch.int32)
    chunks = [Chunk.of(seq, 16, 1), Chunk.of(plain, 2, 1), Chunk.of(axes, 8, 3)]
    size = BatchSize(4 + 2, 4 + 6, extensions=EXTENSIONS)
    packed = torch.from_numpy(pack(chunks, [4, 5, 6], size, 4))
    assert [len(array) for array in _cut(packed, size)[-2:]] == [10, 20]
    on_device = DeviceState(state[None], state[:, 0].contiguous(), 4, EXTENSIONS)
    inputs = unpack(packed, size, on_device, [1] * 4 + [6] * 2, [])
    assert inputs.extensions["bias_ids"].tolist() == [[2] + [0] * 9]
    assert inputs.extensions["axes"].squeeze().T.tolist() == [[0, 0]] * 4 + [[1, 3], [1, 4], [2, 0]] + [[0, 0]] * 3
