"""What nodes report of their own times."""

from __future__ import annotations

from baton.errors import InvalidRequest
from baton.node_times import NUM_GAPS, DecodeTimes, Gap, PromptTimes
from baton.v1 import node_pb2
from baton.wire import values

_PROMPT_S = ("started_s", "computed_s", "granted_s", "first_part_s", "last_part_s")


def write_prompt_times(times: PromptTimes | None) -> node_pb2.PromptTimes | None:
    if times is None:
        return None
    return node_pb2.PromptTimes(
        started_s=times.started_s,
        computed_s=times.computed_s,
        num_chunks=times.num_chunks,
        granted_s=times.granted_s,
        first_part_s=times.first_part_s,
        last_part_s=times.last_part_s,
        num_parts=times.num_parts,
        num_held_blocks=times.num_held_blocks,
    )


def read_prompt_times(wire: node_pb2.PromptTimes) -> PromptTimes:
    """Raises InvalidRequest."""
    seconds = {name: values.read_seconds(getattr(wire, name), name) for name in _PROMPT_S}
    return PromptTimes(
        **seconds, num_chunks=wire.num_chunks, num_parts=wire.num_parts, num_held_blocks=wire.num_held_blocks
    )


def write_decode_times(times: DecodeTimes | None) -> node_pb2.DecodeTimes | None:
    if times is None:
        return None
    longest = [node_pb2.Gap(step=gap.step, gap_s=gap.gap_s) for gap in times.longest]
    return node_pb2.DecodeTimes(num_steps=times.num_steps, decode_s=times.decode_s, longest=longest)


def read_decode_times(wire: node_pb2.DecodeTimes) -> DecodeTimes:
    """Raises InvalidRequest."""
    if len(wire.longest) > NUM_GAPS:
        raise InvalidRequest(f"{len(wire.longest)} gaps, of at most {NUM_GAPS}", "longest")
    longest = tuple(Gap(gap.step, values.read_seconds(gap.gap_s, "gap_s")) for gap in wire.longest)
    return DecodeTimes(wire.num_steps, values.read_seconds(wire.decode_s, "decode_s"), longest)
