"""How outputs grow from pieces."""

from __future__ import annotations

from baton.messages import TokenLogprobs
from baton.sampling import FinishReason
from baton_llm.outputs import Collector, Logprob, news
from baton_llm.prompts import Encoded
from router.text.answer import Delta


def test_an_output_stays_as_it_was_given_away():
    collector = Collector("r", Encoded("ab", (1, 2)), 2, True, str)
    collector.add([Delta(1, "x", (5,), (TokenLogprobs(-1.0, ((5, -1.0), (6, -2.0))),))])
    early = collector.output(finished=False)
    collector.add([Delta(1, "y", (7,), (TokenLogprobs(-3.0, ((8, -0.5),)),), FinishReason.STOP, "z")])
    late = collector.output(finished=True, num_cached_tokens=1)
    assert (early.outputs[1].text, early.outputs[1].token_ids, early.outputs[1].finished()) == ("x", [5], False)
    assert early.outputs[1].logprobs == [{5: Logprob(-1.0, 1, "5"), 6: Logprob(-2.0, 2, "6")}]
    answer = late.outputs[1]
    assert (answer.text, answer.token_ids, answer.stop_reason, answer.finished()) == ("xy", [5, 7], "z", True)
    assert (answer.logprobs or [])[1:] == [{7: Logprob(-3.0, None, "7"), 8: Logprob(-0.5, 1, "8")}]
    assert answer.cumulative_logprob == -4.0
    assert (late.outputs[0].token_ids, late.outputs[0].finish_reason, collector.all_ended) == ([], None, False)


def test_outputs_without_texts_have_the_rest():
    collector = Collector("r", Encoded("ab", (1, 2)), 1, True, str, with_text=False)
    collector.add([Delta(0, "x", (5,), (TokenLogprobs(-1.0, ((5, -1.0),)),), FinishReason.LENGTH)])
    [answer] = collector.output(finished=True).outputs
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [5], "length")
    assert answer.logprobs == [{5: Logprob(-1.0, 1, None)}]


def test_news_are_what_the_output_before_did_not_have():
    collector = Collector("r", Encoded("ab", (1, 2)), 2, True, str)
    collector.add([Delta(1, "x", (5,), (TokenLogprobs(-1.0, ((5, -1.0),)),))])
    first = collector.output(finished=False)
    assert news(first, None) == first
    collector.add([Delta(1, "", (7,), (TokenLogprobs(-3.0, ((7, -3.0),)),), FinishReason.LENGTH)])
    second = collector.output(finished=False)
    [answer] = news(second, first).outputs
    assert (answer.index, answer.text, answer.token_ids, answer.finish_reason) == (1, "", [7], "length")
    assert answer.logprobs == [{7: Logprob(-3.0, 1, "7")}]
    assert answer.cumulative_logprob == -4.0
    assert news(collector.output(finished=True, num_cached_tokens=1), second).outputs == []
