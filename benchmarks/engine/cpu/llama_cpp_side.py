"""llama.cpp's side of `benchmarks.engine.cpu`, by the package llama-cpp-python: Q8_0 of the same weights."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_MAX_SEQS, _MAX_TOKENS, _CONTEXT = 8, 1024, 2048


def open_runner(name: str, dtype: str, folder: Path, threads: int) -> LlamaRunner:
    file = folder / "q8_0.gguf"
    if not file.exists():
        write_gguf(folder, file)
    return LlamaRunner(file, threads)


def write_gguf(folder: Path, file: Path) -> None:
    """The checkpoint, of Qwen 2's class with tied embeddings, without a tokenizer: matrices in Q8_0, the rest fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer: Any = gguf.GGUFWriter(str(file), "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    shards = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    for name, tensor in (entry for shard in shards for entry in shard.items()):
        values = tensor.float().numpy()
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    if stem in ("embed_tokens", "norm"):
        return f"{'token_embd' if stem == 'embed_tokens' else 'output_norm'}.{kind}"
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


class LlamaRunner:
    """See `benchmarks.engine.cpu.side.Runner`. By the C API: the package's own class takes one sequence."""

    def __init__(self, file: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = _MAX_SEQS * _CONTEXT, _MAX_TOKENS, _MAX_TOKENS
        options.n_seq_max, options.n_threads, options.n_threads_batch = _MAX_SEQS, threads, threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_MAX_TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[float]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        answers: list[list[int]] = [[] for _ in prompts]
        times, length = [], len(prompts[0])
        for turn in range(num_tokens):
            began = time.perf_counter()
            if turn == 0:
                rows = [self._decode([(i, list(enumerate(prompt)))])[0] for i, prompt in enumerate(prompts)]
            else:
                rows = self._decode([(i, [(length + turn - 1, of[-1])]) for i, of in enumerate(answers)])
            for of, token in zip(answers, rows, strict=True):
                of.append(token)
            times.append((time.perf_counter() - began) * 1e3)
        return answers, times

    def _decode(self, sequences: list[tuple[int, list[tuple[int, int]]]]) -> list[int]:
        """The most likely token after each sequence's (position, token) pairs."""
        batch, ends, at = self._batch, [], 0
        for seq, pairs in sequences:
            for position, token in pairs:
                batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, position, 1, 0
                batch.seq_id[at][0] = seq
                at += 1
            ends.append(at - 1)
            batch.logits[at - 1] = 1
        batch.n_tokens = at
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [int(self._logits(end).argmax()) for end in ends]

    def _logits(self, index: int) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))
