"""Blocks of prompts that are under way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.placement.pending_blocks import PendingBlocks

PROMPTS = st.lists(
    st.tuples(st.sampled_from("pqd"), st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=5, unique=True)),
    max_size=8,
)


@given(PROMPTS, st.lists(st.booleans(), min_size=8, max_size=8), st.permutations([b"a", b"b", b"c", b"d"]))
def test_it_knows_what_the_prompts_under_way_have(
    prompts: list[tuple[str, list[bytes]]], ended: list[bool], asked: list[bytes]
) -> None:
    pending = PendingBlocks()
    for node, blocks in prompts:
        pending.add(node, blocks)
    left = [prompt for prompt, over in zip(prompts, ended, strict=False) if not over]
    for (node, blocks), over in zip(prompts, ended, strict=False):
        if over:
            pending.remove(node, blocks)
    expected, all_there = {}, {}
    for name in "pqd":
        if there := {block for node, blocks in left if node == name for block in blocks}:
            all_there[name] = there
        leading = next((i for i, block in enumerate(asked) if block not in there), len(asked))
        if leading:
            expected[name] = leading
    assert {name: number for name, number in pending.held(asked).items() if number} == expected
    assert {name: set(counts) for name, counts in pending._of_nodes.items()} == all_there, "nothing else is kept"
    assert pending.held([]) == {}
