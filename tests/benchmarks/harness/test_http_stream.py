import json

import pytest

from benchmarks.harness.http_stream import RequestFailed, Streamed, _take


def events(*tokens: list[int]) -> bytes:
    """One chunk with an event for each list of tokens."""
    choices = [{"token_ids": ids, "text": "x" * len(ids)} for ids in tokens]
    return b"".join(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices)


def test_tokens_of_one_chunk_arrive_together() -> None:
    answer = Streamed(1.0)
    _take(answer, events([5]), 3.0)
    _take(answer, events([6], [7, 8]) + b"data: [DONE]\n\n", 7.0)
    assert (answer.tokens, answer.text) == ([5, 6, 7, 8], "xxxx")
    assert answer.arrivals == [3.0, 7.0, 7.0, 7.0]
    assert (answer.first_token_s, answer.first_gap_s, answer.longest_gap_s) == (2.0, 4.0, 4.0)
    assert answer.between_tokens_s == [4.0, 0.0, 0.0]


def test_an_error_in_the_stream_ends_it() -> None:
    with pytest.raises(RequestFailed, match="gone"):
        _take(Streamed(0.0), b'data: {"error": {"message": "gone"}}\n\n', 1.0)
