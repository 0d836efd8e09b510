"""Names of blocks: equal for equal KV, and for nothing else."""

from __future__ import annotations

import hashlib

from baton.block_hash import chain, next_hash, root_hash

TOKENS = tuple(range(10, 23))


def test_a_name_stands_for_all_tokens_up_to_its_end() -> None:
    names = chain(TOKENS, 4)
    assert len(names) == len(set(names)) == 3, "the last block is not full"
    assert chain(TOKENS[:8], 4) == names[:2]
    assert chain((99, *TOKENS[1:]), 4)[2] != names[2]
    assert chain((*TOKENS[:11], 99), 4)[:2] == names[:2]
    repeated = chain(TOKENS[:4] * 3, 4)
    assert len(set(repeated)) == 3, "equal tokens behind other beginnings are other KV"


def test_salts_part_caches_and_tokens_of_two_requests_do_not_run_together() -> None:
    assert not set(chain(TOKENS, 4)) & set(chain(TOKENS, 4, "salt"))
    assert chain(TOKENS, 4, "a") != chain(TOKENS, 4, "b")


def test_names_are_the_same_on_every_node_and_version() -> None:
    root = hashlib.sha256(b"baton.kv.v1\0salt").digest()
    first = hashlib.sha256(root + bytes([1, 0, 0, 0, 0, 1, 0, 0])).digest()
    assert root_hash("salt") == root
    assert next_hash(root, (1, 256)) == first
    assert chain((1, 256), 2, "salt") == [first]
