"""The process of a rank that only computes: it loads its part of the model and computes the steps that rank 0 sends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from baton.telemetry import configure_logging
from node.garbage import collected_once
from node.ranks.rank_links import RankLink, Serve
from node.settings import NodeSettings

if TYPE_CHECKING:
    from engine.model.rank import RankModel
    from kv_transfer.pool_server import AfterSteps


def run_rank(link: RankLink, settings: NodeSettings) -> None:
    """Run until the node closes the rank. Raises what loading raises, and RuntimeError when another rank is lost."""
    name = f"{settings.node_id or settings.listen.port}/{link.number}"
    configure_logging(settings.log_levels(), name, log_format=settings.log_format)

    with collected_once():
        rank, serve_pool = _load(link, settings)
    from engine.model.other_ranks import serve  # it imports torch: not before collections are off

    link.ready(rank.device, serve_pool)
    serve(rank, link.receive)


def _load(link: RankLink, settings: NodeSettings) -> tuple[RankModel, Serve]:
    """Load the rank's model, and make the server of its pool."""
    import torch

    from engine.model.load.checkpoint import Checkpoint
    from engine.model.parallel.data_parallel import ONE_NODE
    from engine.model.parallel.pipeline import Pipeline
    from engine.model.rank import RankModel
    from kv_transfer.pool_server import PoolServer
    from node.peers.data_parallel import join_ranks
    from node.ranks.kv_layout import fingerprint_of, layout_of
    from node.ranks.part import device_of, load_part
    from node.ranks.pool_links import make_link

    gc.freeze()
    # The rank joins after the imports, which take seconds; rank 0 imports at the same time.
    checkpoint, device = Checkpoint.find(settings.model, settings.revision), device_of(settings, link.number)
    everyone, peers = link.join(device, partial(fingerprint_of, settings, checkpoint))
    pipeline = Pipeline(everyone, settings.pipeline_parallel_size)
    data = ONE_NODE if peers is None else join_ranks(settings, link.number, peers, device)
    part = load_part(settings, checkpoint, pipeline, data)
    last_tokens = torch.zeros(part.config.max_num_seqs, dtype=torch.int32, device=device)
    rank = RankModel(
        part.model,
        part.config,
        part.probed,
        last_tokens,
        pipeline=pipeline,
        data=data,
        layer_groups=settings.layer_groups(device.type == "cuda"),
    )

    def serve_pool(send: Callable[..., None], after_steps: AfterSteps, fail: Callable[[Exception], None]) -> PoolServer:
        """Serve the pool to rank 0."""
        layout = layout_of(settings, checkpoint, part.kv, part.groups)
        host = link.host or settings.listen.host  # --listen is an address of rank 0's host
        make = partial(make_link, settings, device, host)
        return PoolServer(rank.pool.as_bytes(), layout, make, send, after_steps, fail)

    return rank, serve_pool
