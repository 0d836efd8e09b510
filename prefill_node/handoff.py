"""A request on its way through a prefill node, and the decode node that it goes to."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from baton.errors import InvalidRequest
from baton.handoff_messages import Commit, Grant
from baton.messages import HandedOff, Prefill, Sample, SampleEnd, Tokens
from baton.node_times import PromptTimes
from engine.step import SampledToken
from node.handoffs.sending import KvSending


def needs_decode_node(prefill: Prefill) -> bool:
    """Whether its samples may have more tokens after the one that is sampled here. A beam search runs on the decode
    node from its first token on."""
    if prefill.sampling.beam_width:
        return True
    return bool(prefill.samples) and prefill.sampling.max_tokens - len(prefill.samples[0].output_tokens) > 1


def without_last_token(prefill: Prefill) -> Prefill:
    """What a prefill node computes for a beam search: the decode node computes the prompt's last token, whose logits
    give the first candidates. Raises InvalidRequest if nothing is left."""
    if len(prefill.prompt_tokens) < 2:
        raise InvalidRequest("a beam search from a single token needs no prefill node", "prompt")
    return replace(prefill, prompt_tokens=prefill.prompt_tokens[:-1])


class HandoffState(enum.Enum):
    """What the request still waits for here. The grant may come before or after the prompt is computed.

    COMPUTING --prompt computed, granted--> SENDING --Commit accepted, all parts sent--> (gone: HandedOff)
        |                                      |
        +--- all samples ended with the first token: End, Release
        `--- abort, deadline, refused, peer lost: End(error), Release; granted parts are drained
    """

    COMPUTING = "computing"
    SENDING = "sending"


@dataclass(slots=True, kw_only=True, eq=False)
class Handoff(KvSending):
    """`results`: what the prompt's last chunk sampled, held back from the router until D has granted or every sample
    has ended."""

    message: Prefill
    received: float
    started: float = 0.0
    state: HandoffState = HandoffState.COMPUTING
    results: list[Tokens | SampleEnd] = field(default_factory=list)
    computed: float | None = None  # when the prompt was computed
    num_chunks: int = 0  # chunks of the prompt that are computed
    prefill_s: float = 0.0  # from the scheduling of the first chunk to the first token

    @property
    def outputs(self) -> dict[int, tuple[int, ...]]:
        """Output tokens of each unfinished sample, the one sampled here included."""
        ended = {r.sample for r in self.results if isinstance(r, SampleEnd)}
        fresh = {r.sample: r.token_ids for r in self.results if isinstance(r, Tokens)}
        if self.message.sampling.beam_width:
            return {sample.index: () for sample in self.message.samples}
        return {s.index: s.output_tokens + fresh[s.index] for s in self.message.samples if s.index not in ended}

    def sampled(self, token: SampledToken, now: float) -> None:
        """The prompt is computed; this is the first token of one of its samples, which a beam search does not use."""
        self.computed, self.prefill_s = now, now - self.started
        if self.message.sampling.beam_width:
            return
        logprobs = (token.logprobs,) if token.logprobs else ()
        self.results.append(Tokens(token.sample, token.index, (token.token,), logprobs))
        if token.finish:
            self.results.append(SampleEnd(token.sample, token.finish, token.stop_token_id))

    def commit(self, grant: Grant, now: float, age_s: float) -> Commit:
        """The Commit that gives the request to the decode node, `age_s` after its prompt was computed."""
        prefill = self.message
        assert prefill.decode is not None
        return Commit(
            lease=grant.lease,
            attempt_id=prefill.attempt_id,
            target_incarnation=prefill.decode.incarnation,
            prompt_tokens=prefill.prompt_tokens,
            samples=tuple(Sample(index, tokens) for index, tokens in self.outputs.items()),
            sampling=prefill.sampling,
            deadline_s=self.deadline - now,
            cache_salt=prefill.cache_salt,
            age_s=age_s,
        )

    def handed_off(self) -> HandedOff:
        """The final update. Transfers before the prompt was computed are hidden behind it and count as no time."""
        assert self.computed is not None
        gathered, sent = max(self.computed, self.gathered), max(self.computed, self.sent)
        return HandedOff(self.prefill_s, gathered - self.computed, sent - gathered, self.times())

    def times(self) -> PromptTimes | None:
        """Counted from the receipt of the prompt; None: it is not computed."""
        if self.computed is None:
            return None

        def since_receipt(when: float) -> float:
            return max(0.0, when - self.received) if when else 0.0

        return PromptTimes(
            started_s=since_receipt(self.started),
            computed_s=since_receipt(self.computed),
            num_chunks=self.num_chunks,
            granted_s=since_receipt(self.granted),
            first_part_s=since_receipt(self.first_ready),
            last_part_s=since_receipt(self.sent),
            num_parts=self.num_sent,
            num_held_blocks=self.grant.num_held_blocks if self.grant else 0,
        )
