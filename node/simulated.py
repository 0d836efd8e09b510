"""The parts of a node with `--engine simulated`: a profile instead of a model, and slots without memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.incarnation import new_incarnation
from baton.layout import KvLayout
from baton.node_info import GenerationDefaults
from engine.checkpoint import local_folder, read_config, read_generation_defaults, read_json
from engine.config import EngineConfig
from engine.engine import Engine
from engine.simulated.alarm import Alarm
from engine.simulated.profile import Profile, load_profile
from engine.simulated.runner import SimulatedModelRunner
from engine.simulated.tokens import MadeUpTokens
from kv_transfer.parts import slot_bytes_for
from kv_transfer.slots import Slots
from kv_transfer.transports.carriers.simulated import SimulatedCarrier
from kv_transfer.transports.pair.transport import PairTransport
from node.base import Base, Link
from node.describe import TokenizerFiles
from node.logits_processors import LogitsProcessors
from node.settings import NodeSettings
from node.slots import slot_sizes

log = logging.getLogger(__name__)

_NULL_BLOCK = 1


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """Implements `node.describe.ServedModel`."""

    engine: Engine
    layer_groups: int
    layout: KvLayout
    served_model_name: str
    tokenizer: TokenizerFiles
    generation_defaults: GenerationDefaults
    graph_sizes: list[int] = dataclasses.field(default_factory=lambda: [1])  # steps cost as with CUDA graphs
    pools: tuple[None] = (None,)
    experts: None = None
    on_gpu: bool = True  # for the sizes of slots and steps, since profiles describe GPUs

    def warm_up(self) -> None:
        """Nothing is compiled."""


def make_simulated_base(settings: NodeSettings, wake: Callable[[], None]) -> Base:
    """Raises ValueError with a one-line message for the user, and TransferError."""
    assert settings.profile is not None
    profile, alarm = load_profile(settings.profile), Alarm(wake)
    built = simulate(settings, profile, alarm.clock, alarm.at)
    sizes = slots_for(settings, profile, built)
    host, secret = settings.listen.host, settings.trust().secret

    def make_links(num_slots: int) -> list[Link]:
        slots = Slots(num_slots, sizes.slot_bytes)
        carrier = SimulatedCarrier(profile.link.bandwidth_gb_s * 1e9 * settings.time_scale)
        return [Link(slots, PairTransport(slots, wake, carrier, settings.transfer_interface, host, secret))]

    links = make_links(sizes.num_slots)
    log.info(
        "simulated profile=%s kv_blocks=%d max_model_len=%d max_num_seqs=%d time_scale=%g",
        profile.name,
        built.engine.blocks.num_total,
        built.engine.config.max_model_len,
        built.engine.config.max_num_seqs,
        settings.time_scale,
    )
    return Base(settings, built, links, make_links, new_incarnation(), None, LogitsProcessors({}))


def slots_for(
    settings: NodeSettings, profile: Profile, built: SimulatedModel, clock: Callable[[], float] = time.monotonic
) -> Slots:
    """As many slots, and as large ones, as suit the profile's link, unless settings say otherwise."""
    bandwidth = settings.kv_link_bandwidth or profile.link.bandwidth_gb_s
    block_bytes = built.layout.rank_block_bytes
    sizes = slot_sizes(settings.model_copy(update={"kv_link_bandwidth": bandwidth}), block_bytes, built.on_gpu)
    return Slots(sizes.num_slots, slot_bytes_for(sizes.part_blocks, block_bytes), clock)


def simulate(
    settings: NodeSettings, profile: Profile, clock: Callable[[], float], wake_at: Callable[[float], None]
) -> SimulatedModel:
    """clock, wake_at: see SimulatedModelRunner. Raises ValueError."""
    folder = local_folder(settings.model)
    if folder is None:
        raise ValueError(f"--model {settings.model}: a simulated node needs a local folder, for the tokenizer")
    files = _read_model(folder)
    config = engine_config(settings, profile, files.vocab_size, files.generation_defaults.eos_token_ids)
    layer_groups = settings.kv_layer_groups or profile.node.layer_groups
    runner = SimulatedModelRunner(
        profile,
        MadeUpTokens(config.vocab_size, (*config.eos_token_ids, *files.special_ids)),
        clock=clock,
        wake_at=wake_at,
        layer_groups=layer_groups,
        time_scale=settings.time_scale,
        seed=settings.seed,
    )
    fingerprint = hashlib.sha256(f"simulated {files.digest} {profile.model}".encode()).hexdigest()
    return SimulatedModel(
        engine=Engine(config, runner, clock=clock),
        layer_groups=layer_groups,
        layout=profile.layout(settings.block_size, fingerprint),
        served_model_name=settings.model_name,
        tokenizer=files.tokenizer,
        generation_defaults=files.generation_defaults,
    )


def engine_config(
    settings: NodeSettings, profile: Profile, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> EngineConfig:
    """The sizes that are set, or else the profile's. Raises ValueError, naming the flag."""
    limit = profile.model.max_model_len
    max_model_len = settings.max_model_len or limit
    if max_model_len > limit:
        raise ValueError(f"--max-model-len: {max_model_len} is beyond the profile's context of {limit}")
    num_blocks = settings.num_gpu_blocks_override or profile.node.num_blocks
    if settings.kv_cache_memory_bytes is not None and settings.num_gpu_blocks_override is None:
        num_blocks = settings.kv_cache_memory_bytes // profile.layout(settings.block_size, "").block_bytes
    given, ahead = settings.model_fields_set, settings.async_scheduling
    return EngineConfig(
        num_blocks=num_blocks + _NULL_BLOCK,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs if "max_num_seqs" in given else profile.node.max_num_seqs,
        max_num_batched_tokens=settings.batched_tokens(profile.node.async_scheduling),
        saturating_num_tokens=settings.saturating_num_tokens,
        async_scheduling=profile.node.async_scheduling if ahead is None else ahead,
        target_itl_s=settings.target_itl_s,
        max_logprobs=settings.most_logprobs(vocab_size),
    )


# ---- the model's files, of which only those of the tokenizer matter ----


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    """`special_ids`: tokens that do not stand for text."""

    tokenizer: TokenizerFiles
    generation_defaults: GenerationDefaults
    vocab_size: int
    special_ids: tuple[int, ...]
    digest: str


@functools.cache  # a fleet in one process reads them once
def _read_model(folder: Path) -> _ModelFiles:
    """Raises ValueError."""
    stated = read_config(folder)
    tokenizer = _read_tokenizer(folder)
    added = json.loads(tokenizer.json).get("added_tokens", ())
    return _ModelFiles(
        tokenizer,
        read_generation_defaults(folder, stated),
        int(stated["vocab_size"]),
        tuple(int(token["id"]) for token in added if token.get("special")),
        hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest(),
    )


def _read_tokenizer(folder: Path) -> TokenizerFiles:
    """Raises ValueError: without transformers, only a tokenizer.json can be read."""
    try:
        data = (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise ValueError(f"{folder}: a simulated node needs tokenizer.json: {error.strerror}") from None
    config = folder / "tokenizer_config.json"
    stated = read_json(config) if config.is_file() else {}
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else stated.get("chat_template")
    names = {name: _text(value) for name, value in stated.items() if name.endswith("_token")}
    special = {name: text for name, text in names.items() if text is not None}
    return TokenizerFiles(data, template if isinstance(template, str) else "", special)


def _text(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
