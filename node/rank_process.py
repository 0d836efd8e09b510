"""The process of a rank that only computes: it loads its part of the model, and does what rank 0 sends."""

from __future__ import annotations

import logging

from baton.telemetry import configure_logging
from node.ranks import RankSeat
from node.settings import NodeSettings

log = logging.getLogger(__name__)


def run_rank(seat: RankSeat, settings: NodeSettings) -> None:
    """Until the node closes the rank. Raises what loading raises, and RuntimeError when another rank is lost."""
    name = f"{settings.node_id or settings.listen.port}/{seat.number}"
    configure_logging(settings.log_levels(), name, log_format=settings.log_format)

    import torch

    from engine.model.load.checkpoint import Checkpoint
    from engine.model.parallel.data_parallel import ONE_NODE
    from engine.model.parallel.others import serve
    from engine.model.parallel.pipeline import Pipeline
    from engine.model.rank import RankModel
    from node.data_parallel import join_ranks
    from node.rank_part import device_of, load_part

    # Joined after the imports, which take seconds: rank 0 has its own meanwhile.
    device = device_of(settings, seat.number)
    everyone, peers = seat.join(device)
    pipeline = Pipeline(everyone, settings.pipeline_parallel_size)
    data = ONE_NODE if peers is None else join_ranks(settings, seat.number, peers, device)
    part = load_part(settings, Checkpoint.find(settings.model, settings.revision), pipeline, data)
    last_tokens = torch.zeros(part.config.max_num_seqs, dtype=torch.int32, device=device)
    rank = RankModel(
        part.model,
        part.config,
        part.probed,
        last_tokens,
        pipeline=pipeline,
        data=data,
        layer_groups=settings.layer_groups(device.type == "cuda"),
        memory=seat.memory(device),
    )
    seat.ready(rank.pool.tensor)
    serve(rank, seat.receive)
