"""Rules from figures to proposals. Each looks at one thing, and has none to make if that is as it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.telemetry.pools import FULL
from deploy.tune.figures import Figures, Pool

MOST_OF_THE_TIME = 0.5
"""A bottleneck for less is a burst."""
IDLE = 0.2
MUCH = 0.25
"""Of the time to first token, in a stage that should take little."""
ROOMY = 0.6
MANY_PREEMPTIONS = 0.01
STALL = 4.0
"""An inter-token latency this many times the median is one."""
GOOD_ITL = 2.5
"""--target-itl as a multiple of a step without prompts (`docs/placement.md`): prompts still advance beside decodes."""
_WAITS = {"queue": "prefill", "wait_for_node": "decode", "reserve": "decode"}
"""Stages of the time to first token in which a request waits for a node of that pool."""
SMALL_STEP_TOKENS = 2048
"""A GPU is not busy with fewer tokens of prompts at once."""
MIN_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Goals:
    """What users were promised, in seconds; None: nothing."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """setting: flags, or nodes. change: what to do with it. why: a sentence with the figures used."""

    setting: str
    change: str
    why: str


Rule = Callable[[Figures, Goals], Proposal | None]


def propose(figures: Figures, goals: Goals) -> list[Proposal]:
    return [proposal for rule in RULES if (proposal := rule(figures, goals)) is not None]


# ---- how many nodes ----


def busy(figures: Figures, name: str, goals: Goals) -> float | None:
    """How much of what a pool can do it does; 1: all. A prefill node is as busy as its device. A decode node's device
    computes all the time, with one request as with a hundred: its room for more counts, and the latency that was
    promised. None: not known."""
    pool = figures.pool(name)
    shares = [pool.kv_blocks, pool.seats]
    if name == "prefill":
        if pool.device is None:
            return None
        shares.append(pool.device)
    elif goals.itl_s is not None and figures.itl_p50_s is not None:
        shares.append(figures.itl_p50_s / goals.itl_s)
    return max(shares)


def load_of(figures: Figures, name: str, goals: Goals) -> float | None:
    """How many nodes would be just busy with what the pool does. What waits counts as work beyond what runs."""
    pool, share = figures.pool(name), busy(figures, name, goals)
    if not pool.num_nodes or share is None:
        return None
    return pool.num_nodes * share * (1 + min(1.0, pool.waiting / max(pool.running, 1.0)))


def best_split(prefill_load: float, decode_load: float, num_nodes: int) -> int:
    """Of that many nodes, how many should prefill so that the busier pool is least busy. At least one of each."""
    return min(range(1, num_nodes), key=lambda p: max(prefill_load / p, decode_load / (num_nodes - p)))


def ratio(figures: Figures, goals: Goals) -> Proposal | None:
    """Another share of the same nodes, if one pool limits and another split would make it a fifth less busy."""
    prefill, decode = figures.prefill, figures.decode
    loads = load_of(figures, "prefill", goals), load_of(figures, "decode", goals)
    if loads[0] is None or loads[1] is None or _limiting(figures) is None:
        return None
    num_nodes = prefill.num_nodes + decode.num_nodes
    best = best_split(loads[0], loads[1], num_nodes)
    best = min(best, 2 * prefill.num_nodes)  # no more at once: figures change with the ratio
    best = max(best, num_nodes - 2 * decode.num_nodes)
    now = max(loads[0] / prefill.num_nodes, loads[1] / decode.num_nodes)
    then = max(loads[0] / best, loads[1] / (num_nodes - best))
    if best == prefill.num_nodes or then > 0.8 * now:
        return None
    why = (
        f"{_limiting(figures)} nodes limit {figures.bottleneck[_limiting(figures) or '']:.0%} of the time: prefill has "
        f"work for {loads[0]:.1f} nodes and decode for {loads[1]:.1f}, so the busier pool would be "
        f"{then:.0%} instead of {now:.0%} busy."
    )
    change = f"{best}:{num_nodes - best} instead of {prefill.num_nodes}:{decode.num_nodes}"
    return Proposal("P:D ratio", change, why)


def grow(figures: Figures, goals: Goals) -> Proposal | None:
    """One node more for the pool that limits, if no other split helps."""
    name = _limiting(figures)
    if name is None or ratio(figures, goals) is not None:
        return None
    pool = figures.pool(name)
    why = (
        f"The {name} pool limits {figures.bottleneck[name]:.0%} of the time: {pool.waiting:.1f} requests wait "
        f"for it, with {pool.kv_blocks:.0%} of KV blocks and {pool.seats:.0%} of seats in use."
    )
    return Proposal(f"{name} nodes", f"{pool.num_nodes + 1} instead of {pool.num_nodes}", why)


def first_token(figures: Figures, goals: Goals) -> Proposal | None:
    """One node more for the pool that first tokens wait for, if they come later than promised."""
    if goals.ttft_s is None or (figures.ttft_p90_s or 0.0) <= goals.ttft_s or _limiting(figures) is not None:
        return None
    stage = max(_WAITS, key=figures.stage_share)
    if figures.stage_share(stage) < MUCH:
        return None
    name = _WAITS[stage] if figures.prefill.num_nodes else "decode"
    why = (
        f"One first token in ten takes {_ms(figures.ttft_p90_s)} or more, the goal is {_ms(goals.ttft_s)}, and "
        f"{figures.stage_share(stage):.0%} of that time is spent in {stage}."
    )
    num_nodes = figures.pool(name).num_nodes
    return Proposal(f"{name} nodes", f"{num_nodes + 1} instead of {num_nodes}", why)


def shrink(figures: Figures, goals: Goals) -> Proposal | None:
    """One node less where all are hardly used, and nothing limits."""
    if figures.bottleneck.get("none", 0.0) < FULL or not figures.num_requests:
        return None
    for name in ("prefill", "decode"):
        pool, share = figures.pool(name), busy(figures, name, goals)
        if pool.num_nodes >= 2 and share is not None and share < IDLE and pool.waiting < pool.num_nodes * IDLE:
            why = f"The {name} pool does {share:.0%} of what it can: {_used(pool)}."
            return Proposal(f"{name} nodes", f"{pool.num_nodes - 1} instead of {pool.num_nodes}", why)
    return None


def _used(pool: Pool) -> str:
    device = "" if pool.device is None else f"its devices compute {pool.device:.0%} of the time, "
    return f"{device}{pool.kv_blocks:.0%} of its KV blocks and {pool.seats:.0%} of its seats are in use"


def _limiting(figures: Figures) -> str | None:
    for name in ("decode", "prefill"):
        if figures.bottleneck.get(name, 0.0) >= MOST_OF_THE_TIME:
            return name
    return None


# ---- the size of steps ----


def prefill_step(figures: Figures, goals: Goals) -> Proposal | None:
    """Larger steps on prefill nodes whose queue is long although their steps are small."""
    pool = figures.prefill
    tokens = pool.tokens_per_step
    if tokens is None or tokens >= SMALL_STEP_TOKENS or pool.waiting < pool.num_nodes or not pool.num_nodes:
        return None
    if figures.stage_share("queue") < MUCH:
        return None
    why = (
        f"Prompts queue for {figures.stage_share('queue'):.0%} of the time to first token, and a step has "
        f"{tokens:.0f} tokens of prompts."
    )
    return Proposal("--max-num-batched-tokens", f"{4 * _power_of_2(tokens)} on prefill nodes", why)


def decode_step(figures: Figures, goals: Goals) -> Proposal | None:
    """Smaller chunks of prompts on decode nodes whose streams stall."""
    pool, itl = figures.decode, figures.itl_p99_s
    if not _stalls(figures, goals) or pool.tokens_per_step is None or itl is None:
        return None
    now = _power_of_2(pool.tokens_per_step)
    if now // 2 < MIN_CHUNK:
        return None
    why = (
        f"{_stall_text(figures, goals)}; {pool.prompt_steps or 0:.0%} of the steps of decode nodes compute prompts "
        f"too, {pool.tokens_per_step:.0f} tokens each."
    )
    return Proposal("--max-num-batched-tokens", f"{now // 2} on decode nodes", why)


def target_itl(figures: Figures, goals: Goals) -> Proposal | None:
    """A limit on what prompts add to a step, if streams stall because of prompts."""
    if not _stalls(figures, goals) or figures.itl_p50_s is None:
        return None
    target_ms = 1e3 * (goals.itl_s or GOOD_ITL * figures.itl_p50_s)
    why = f"{_stall_text(figures, goals)}; chunks of prompts then follow from what a step is predicted to take."
    return Proposal("--target-itl", f"{target_ms:.3g} on decode nodes", why)


def _stalls(figures: Figures, goals: Goals) -> bool:
    """Whether tokens come late, and prompts beside them can be why."""
    itl, share = figures.itl_p99_s, figures.decode.prompt_steps
    if itl is None or figures.itl_p50_s is None or not share or share < 0.005:
        return False
    return itl > (goals.itl_s if goals.itl_s is not None else STALL * figures.itl_p50_s)


def _stall_text(figures: Figures, goals: Goals) -> str:
    limit = f"the goal is {_ms(goals.itl_s)}" if goals.itl_s is not None else f"the median is {_ms(figures.itl_p50_s)}"
    return f"One inter-token latency in 100 is {_ms(figures.itl_p99_s)} or more, and {limit}"


# ---- the pool ----


def preemptions(figures: Figures, goals: Goals) -> Proposal | None:
    """Fewer sequences, or more blocks, where sequences lose their blocks to others."""
    share = figures.decode.preemptions
    if share is None or share <= MANY_PREEMPTIONS:
        return None
    why = (
        f"For 100 attempts on decode nodes, sequences lost their KV blocks to others {100 * share:.3g} times and were "
        f"computed again, with {figures.decode.kv_blocks:.0%} of the blocks in use on average."
    )
    return Proposal("--max-num-seqs, --gpu-memory-utilization", "lower the first, or raise the second", why)


def pool_size(figures: Figures, goals: Goals) -> Proposal | None:
    """More KV blocks where they run out before seats do."""
    pool = figures.decode
    if pool.kv_blocks < FULL or pool.seats >= ROOMY or not pool.waiting:
        return None
    why = (
        f"{pool.kv_blocks:.0%} of the KV blocks of decode nodes are in use and {pool.seats:.0%} of their seats, while "
        f"{pool.waiting:.1f} requests wait: memory limits the batch."
    )
    return Proposal("--gpu-memory-utilization", "raise it on decode nodes, to 0.95 at most", why)


def seats(figures: Figures, goals: Goals) -> Proposal | None:
    """More sequences where seats run out before KV blocks do."""
    pool = figures.decode
    if pool.seats < FULL or pool.kv_blocks >= ROOMY or not pool.waiting:
        return None
    if goals.itl_s is not None and (figures.itl_p50_s or 0.0) > goals.itl_s / 2:
        return None  # a larger batch makes each step longer
    why = (
        f"{pool.seats:.0%} of the seats of decode nodes are in use and {pool.kv_blocks:.0%} of their KV blocks, while "
        f"{pool.waiting:.1f} requests wait."
    )
    return Proposal("--max-num-seqs", "double it on decode nodes", why)


# ---- the way between the pools ----


def transfer(figures: Figures, goals: Goals) -> Proposal | None:
    """A look at the link, or more slots, where KV takes a large part of the time to first token."""
    shares = {stage: figures.stage_share(stage) for stage in ("reserve", "transfer")}
    stage = max(shares, key=lambda name: shares[name])
    if shares[stage] < MUCH:
        return None
    slots = max(figures.prefill.slots or 0.0, figures.decode.slots or 0.0)
    why = f"{shares[stage]:.0%} of the time to first token is spent in {stage}"
    if slots >= FULL:
        return Proposal(
            "--kv-slots", "double it on both roles", f"{why}, with {slots:.0%} of the staging slots in use."
        )
    if stage == "reserve":
        return None  # decode nodes are full, which other rules tell
    return Proposal("the link", "run baton doctor --peer between a prefill and a decode node", f"{why}.")


def host(figures: Figures, goals: Goals) -> Proposal | None:
    """More CPU where devices wait for their hosts."""
    for name in ("decode", "prefill"):
        gap = figures.pool(name).gap
        if gap is not None and gap >= IDLE:
            why = f"Devices of {name} nodes wait for their hosts in {gap:.0%} of the time that they have work."
            change = "more or faster cores for each node, nothing else on them; see POST /debug/profile"
            return Proposal("CPU", change, why)
    return None


RULES: tuple[Rule, ...] = (
    *(ratio, grow, first_token, shrink),
    *(prefill_step, decode_step, target_itl),
    *(preemptions, pool_size, seats),
    *(transfer, host),
)


def _power_of_2(tokens: float) -> int:
    """The largest that is not above."""
    return 1 << max(0, int(tokens).bit_length() - 1)


def _ms(seconds: float | None) -> str:
    return f"{1e3 * (seconds or 0.0):.3g} ms"
