"""Settings of a node that say what it computes: the model, how its weights and KV are stored, and the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from baton.node_info import GenerationDefaults
from baton.rpc.trust import ClusterSettings
from baton.sampling import DEFAULT_MAX_LOGPROBS
from baton.settings import JsonObject, Names
from engine.checkpoint import changed_defaults


class ModelSettings(ClusterSettings):
    """What a node computes, and with what."""

    model: str = Field(
        description="folder with a Hugging Face checkpoint, a hub id, or baton-tiny or baton-tiny-moe, "
        "which come with baton"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    served_model_name: Names = Field(
        (),
        description="names by which clients ask for the model, of which the first is in logs and metrics; unset: as in "
        "--model",
    )

    chat_template: Path | None = Field(
        None,
        description="file with a Jinja template for chats; the same on all nodes of a model; unset: the checkpoint's",
    )
    generation_config: Literal["auto", "vllm"] = Field(
        "auto",
        description="where defaults of sampling parameters come from: auto: generation_config.json; vllm: only from "
        "--override-generation-config",
    )
    max_logprobs: int = Field(
        DEFAULT_MAX_LOGPROBS,
        ge=-1,
        lt=1 << 31,
        description="how many likely tokens a request may ask the logprobs of, for each token of answer or prompt; -1: "
        "the whole vocabulary; of several nodes, the smallest counts",
    )
    override_generation_config: JsonObject = Field(
        {},
        description='JSON object of such defaults that come before those, as in {"temperature": 0.5}; '
        "the same on all nodes of a model",
    )

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to compute; auto: cuda where there is one"
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = Field(
        "auto",
        description="of weights and KV cache; auto: float32 on a CPU, else the checkpoint's; a CPU has no float16, and "
        "is fast in bfloat16 if it has AVX512-BF16 or AMX",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = Field(
        "auto",
        description="of the KV cache; auto: that of --dtype; fp8: 8 bits, with a scale for each token and head, which "
        "halves what is stored and sent",
    )
    disable_hybrid_kv_cache_manager: bool = Field(
        False,
        description="keep and send the KV of all tokens in all layers, also of layers with a sliding window, which do "
        "not read it any more; the same on all nodes of a model",
    )
    quantization: Literal["auto-round", "awq", "compressed-tensors", "fp8", "gptq", "int8", "mxfp4"] | None = Field(
        None,
        description="fp8, int8: quantize a 16-bit checkpoint's linear layers while it loads, with a scale per row; "
        "unset, or the checkpoint's own method: as config.json says",
    )
    engine: Literal["torch", "simulated"] = Field(
        "torch",
        description="what computes: torch; simulated: nothing, steps and transfers only take the time that --profile "
        "says, tokens are made up, and torch is not needed",
    )
    profile: str | None = Field(
        None, description="with --engine simulated: file with the times of a real node, or h200-8b (comes with baton)"
    )
    time_scale: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="with --engine simulated: by how much steps and transfers are faster than in the profile",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="how weights are loaded: safetensors: straight from the files or not at all; auto: through "
        "transformers where their names are not the model's own; dummy: random ones, for benchmarks",
    )
    seed: int = Field(
        0, ge=-(1 << 63), lt=1 << 64, description="of torch's generators; requests carry seeds of their own"
    )

    @property
    def model_name(self) -> str:
        """The first of the names by which clients ask for the model."""
        return self.served_model_name[0] if self.served_model_name else self.model

    def most_logprobs(self, vocab_size: int) -> int:
        """--max-logprobs as a number."""
        return vocab_size if self.max_logprobs < 0 else self.max_logprobs

    def read_chat_template(self) -> str | None:
        """That of --chat-template; None: it is not given. Raises ValueError."""
        if (file := self.chat_template) is None:
            return None
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ValueError(f"--chat-template: {file} cannot be read: {error}") from error

    def generation_defaults(self, stated: GenerationDefaults) -> GenerationDefaults:
        """Those of requests, where `stated` are the model's own."""
        own = stated if self.generation_config == "auto" else GenerationDefaults(stated.eos_token_ids)
        return changed_defaults(own, self.override_generation_config)

    @field_validator("override_generation_config")
    @classmethod
    def _check_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        changed_defaults(GenerationDefaults(), given)
        return given

    @model_validator(mode="after")
    def _check_model(self) -> ModelSettings:
        if (self.engine == "simulated") != (self.profile is not None):
            raise ValueError("--profile: goes with --engine simulated, which needs it")
        if self.engine == "torch" and self.time_scale != 1:
            raise ValueError("--time-scale: only goes with --engine simulated")
        return self
