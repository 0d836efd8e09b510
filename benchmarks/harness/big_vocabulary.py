"""A tokenizer.json with a vocabulary of any size, for grammars' masks: random weights need no real one."""

from __future__ import annotations

import json
import re
import sysconfig
from collections import Counter
from itertools import count
from pathlib import Path

_WORD = re.compile(r" ?[A-Za-z]{2,12}|[0-9]{1,3}|[^A-Za-z0-9\s]{1,3}| +")


def big_vocabulary(size: int) -> bytes:
    """A byte-level BPE tokenizer of `size` tokens: all bytes, then the commonest words, numbers and signs in the source
    of Python's library, then made-up words."""
    chars = _byte_chars()
    tokens = dict.fromkeys(chars.values())
    words = Counter[str]()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        words.update(_WORD.findall(file.read_text(errors="ignore")))
        if len(words) > 2 * size:
            break
    made_up = (f" w{number:x}" for number in count())
    for word in (*(word for word, _ in words.most_common()), *(next(made_up) for _ in range(size))):
        if len(tokens) == size:
            break
        tokens["".join(chars[byte] for byte in word.encode())] = None
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {token: index for index, token in enumerate(tokens)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True}  # a word that is a token becomes it
    return json.dumps({"version": "1.0", "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}).encode()


def _byte_chars() -> dict[int, str]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + index) for index, byte in enumerate(others)}
