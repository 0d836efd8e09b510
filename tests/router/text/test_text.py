"""Tokens to text: nothing lost, nothing twice, stop strings wherever they are cut."""

import functools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from baton.sampling import FinishReason
from router.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS
from router.text.answer import Answer, join
from router.text.stops import StopScanner, StopStrings
from router.text.tokenizer import Tokenizer
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer, tokenizer_json, vocab_size

RUNS = settings(max_examples=80, deadline=None, derandomize=True)


@functools.cache
def with_odd_added_tokens() -> Tokenizer:
    """Added tokens whose characters are, and are not, those of a byte-level vocabulary."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json().decode())
    tokenizer.add_tokens(["éa", "ĠĠ", "aĠ日", "<日本>", "a b"])
    return Tokenizer(tokenizer.to_str().encode())


@functools.cache
def byte_fallback() -> Tokenizer:
    """As of the Llama 2 kind: pieces with a mark for the space, and bytes for what the vocabulary lacks."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁wor", "ld", "▁", "é", "!"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return Tokenizer(tokenizer.to_str().encode())


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


@RUNS
@given(st.lists(st.integers(0, 399), max_size=60), st.booleans())
def test_byte_level_pieces_add_up_to_decode(ids, skip):
    assert "".join(pieces(tiny_tokenizer(), ids, skip)) == tiny_tokenizer().decode(ids, skip)


@RUNS
@given(st.lists(st.sampled_from(range(380, 405)), max_size=30), st.booleans())
def test_byte_level_pieces_with_added_tokens_add_up_to_decode(ids, skip):
    assert "".join(pieces(with_odd_added_tokens(), ids, skip)) == with_odd_added_tokens().decode(ids, skip)


fallback_ids = st.one_of(
    st.integers(0, 263),
    st.sampled_from([1 + byte for byte in "🙂é你".encode()]),
    st.integers(257, 263),
    st.just(10_000),  # no token has this id
)


@RUNS
@given(st.lists(fallback_ids, max_size=30), st.booleans())
def test_byte_fallback_pieces_add_up_to_decode(ids, skip):
    assert "".join(pieces(byte_fallback(), ids, skip)) == byte_fallback().decode(ids, skip)


whole_ids = st.lists(st.one_of(st.integers(257, 262), st.just(10_000)), max_size=6)


@RUNS
@given(whole_ids, st.lists(fallback_ids, max_size=10), st.booleans())
def test_an_answer_goes_on_from_its_prompt(before, ids, skip):
    """The first token has its space, as in vLLM, unless nothing comes before it."""
    tokenizer = byte_fallback()
    detokenizer = tokenizer.detokenizer(skip, prompt=before)
    answer = "".join([*(detokenizer.add(token) for token in ids), detokenizer.flush()])
    assert tokenizer.decode(before, skip) + answer == tokenizer.decode(before + ids, skip)


@RUNS
@given(st.lists(st.integers(257, 262), min_size=1), whole_ids)
def test_tokens_among_logprobs_have_the_texts_that_they_have_in_an_answer(before, ids):
    tokenizer = byte_fallback()
    detokenizer = tokenizer.detokenizer(prompt=before)
    answer = "".join([*(detokenizer.add(token) for token in ids), detokenizer.flush()])
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == answer


def test_no_spaces_come_between_special_tokens_where_none_are_wanted():
    """Where a vocabulary has no decoder, its tokens are joined by spaces."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    spaced = Tokenizer(tokenizer.to_str().encode())
    for spaces, text in ((True, "a <s> </s> <s> b </s>"), (False, "a <s></s><s> b </s>")):
        detokenizer = spaced.detokenizer(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert "".join([*(detokenizer.add(token) for token in (0, 2, 3, 2, 1, 3)), detokenizer.flush()]) == text
    skipping = spaced.detokenizer(skip_special_tokens=True, spaces_between_special_tokens=False)
    assert "".join([*(skipping.add(token) for token in (0, 2, 3, 1)), skipping.flush()]) == "a b"


@RUNS
@given(st.text(max_size=40), st.integers(1, 50), st.booleans())
def test_a_text_is_truncated_to_its_last_tokens_beside_the_special_ones(text, most, special):
    tokenizer = tiny_tokenizer()
    whole, content = tokenizer.encode(text, special), tokenizer.encode(text, False)
    kept = tokenizer.encode(text, special, most)
    if len(whole) <= most:
        assert kept == whole
        assert tokenizer.encode(text, special, most, "right") == whole
    else:
        num_special = len(whole) - len(content)
        assert len(kept) == most
        assert kept == whole[:num_special] + content[len(content) - most + num_special :]
        assert tokenizer.encode(text, special, most, "right") == whole[:most]


@RUNS
@given(st.text(max_size=40).filter(lambda text: "<|" not in text))  # a special token's text is skipped
def test_text_survives_a_round_trip_in_pieces(text):
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    assert "".join(pieces(tiny_tokenizer(), list(ids), True)) == text


def test_only_a_character_cut_in_two_waits():
    ids = tiny_tokenizer().encode("a🙂b", add_special_tokens=False)
    out = pieces(tiny_tokenizer(), list(ids), True)
    assert "".join(out) == "a🙂b"
    assert "🙂" in out or "🙂b" in out
    assert all("\ufffd" not in piece for piece in out)


def test_an_id_without_a_token_is_no_text():
    assert pieces(tiny_tokenizer(), [10_000], True) == ["", ""]


def test_special_tokens_are_added_when_asked_for():
    assert tiny_tokenizer().encode("hello", True)[1:] == tiny_tokenizer().encode("hello", False)


# ---- stop strings ----


def first_stop(text: str, may_stop: list[bool], stops: list[str]) -> tuple[str, str] | None:
    """Text before the stop string, and the string: by looking at every end."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches and may_stop[end - 1]:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return None


letters = st.text("ab", min_size=1, max_size=4)


@RUNS
@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(letters, max_size=4), st.integers(0, 4))
def test_stop_strings_are_found_as_by_looking_at_every_end(cut, stops, num_deaf):
    may_stop = [i >= num_deaf for i, piece in enumerate(cut) for _ in piece]
    expected = first_stop("".join(cut), may_stop, stops)
    scanner, text, found = StopScanner(StopStrings(stops)), "", None
    for i, piece in enumerate(cut):
        scan = scanner.add(piece, may_stop=i >= num_deaf)
        text += scan.text
        if scan.stop is not None:
            found = (text, scan.stop)
            break
        assert "".join(cut).startswith(text)
    if found is None:
        assert text + scanner.flush() == "".join(cut)
    assert found == expected


@RUNS
@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(letters, min_size=1, max_size=3))
def test_only_what_could_become_a_match_is_held_back(cut, stops):
    scanner, seen = StopScanner(StopStrings(stops)), ""
    out = ""
    for piece in cut:
        scan = scanner.add(piece, may_stop=False)
        seen, out = seen + piece, out + scan.text
        held = seen[len(out) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_stop_string_stays_when_asked_for():
    assert StopScanner(StopStrings(["lo"]), include=True).add("hello you").text == "hello"


@RUNS
@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=8), st.text("ab", max_size=30))
def test_what_stop_strings_share_is_not_lost(stops, text):
    found = first_stop(text, [True] * len(text), stops)
    scan = StopScanner(StopStrings(stops)).add(text)
    assert (scan.stop, scan.text) == ((found[1], found[0]) if found else (None, scan.text))


def test_the_most_stop_strings_cost_little_for_each_character():
    """Counted, not timed: steps of the automaton, over the text that has the most of them."""
    stops = StopStrings("a" * 31 + chr(200 + i) for i in range(MAX_STOP_STRINGS))
    text, state, steps = "a" * 31 + "b", 0, 0
    for char in text * 100:
        before = state
        state = stops.next(state, char)
        steps += 1 + (stops.held[before] + 1 - stops.held[state])
    assert steps <= 2 * len(text * 100)
    assert sum(map(len, stops.edges)) <= MAX_STOP_CHARS


# ---- answers ----


def answer(stops: tuple[str, ...] = (), min_tokens: int = 0, include: bool = False) -> Answer:
    detokenizer, scanner = tiny_tokenizer().detokenizer(), StopScanner(StopStrings(stops), include)
    return Answer(0, detokenizer, scanner, frozenset({IM_END, ord("!") + 5}), min_tokens, include)


def test_eos_counts_but_is_no_text():
    ids = tiny_tokenizer().encode("hello", False)
    subject = answer()
    got = join([subject.add((*ids, IM_END), ()), subject.end(FinishReason.STOP, None)])
    assert (got.text, got.token_ids, got.finish_reason, got.stop) == ("hello", (*ids, IM_END), FinishReason.STOP, None)
    assert subject.num_tokens == len(ids) + 1


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello\ufffd")])
def test_a_stop_token_is_text_only_when_asked_for(include, text):
    ids = tiny_tokenizer().encode("hello", False)
    token = next(i for i in range(vocab_size()) if tiny_tokenizer().token_bytes(i) == b"\xff")
    subject = Answer(0, tiny_tokenizer().detokenizer(), StopScanner(StopStrings(())), frozenset({token}), 0, include)
    got = join([subject.add((*ids, token), ()), subject.end(FinishReason.STOP, token)])
    assert (got.text, got.stop) == (text, token)


def test_an_ending_token_that_did_not_end_it_is_text():
    token = tiny_tokenizer().encode("hello", False)[0]
    subject = Answer(0, tiny_tokenizer().detokenizer(), StopScanner(StopStrings(())), frozenset({token}))
    assert subject.add((token,), ()).text == ""
    assert subject.add((token,), ()).text == tiny_tokenizer().decode([token])
    assert subject.end(FinishReason.LENGTH, None).text == tiny_tokenizer().decode([token])


def test_tokens_past_a_stop_string_are_neither_delivered_nor_counted():
    ids = tiny_tokenizer().encode("the quick brown fox", False)
    before = next(n for n in range(len(ids)) if "quick" in tiny_tokenizer().decode(ids[:n]))
    subject = answer(("quick",))
    got = subject.add(ids, ())
    assert (got.text, got.token_ids, got.stop) == ("the ", ids[:before], "quick")
    assert (subject.ended, subject.num_tokens) == (True, before)


def test_stop_strings_wait_for_min_tokens():
    ids = tiny_tokenizer().encode("ababab", False)
    assert answer(("b",)).add(ids, ()).text == "a"
    for min_tokens in (2, 3):  # one that ends with token min_tokens comes too early
        subject = answer(("b",), min_tokens=min_tokens)
        got = subject.add(ids, ())
        assert subject.num_tokens == 4
        assert got.text == "aba"


def test_a_stop_string_may_be_complete_only_at_the_end():
    subject = answer(("o\ufffd",))
    cut = tiny_tokenizer().encode("🙂", False)[0]
    head = subject.add((*tiny_tokenizer().encode("hello", False), cut), ())
    got = join([head, subject.end(FinishReason.LENGTH, None)])
    assert (got.text, got.finish_reason, got.stop) == ("hell", FinishReason.STOP, "o\ufffd")
