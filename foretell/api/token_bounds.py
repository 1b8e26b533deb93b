"""How few tokens a text can have, known before it is tokenized.

A token stands for as many bytes as its own text has at most, if the tokenizer joins no others. What
it drops is not counted. Where it may drop or join anything (it strips spaces, or makes one unknown
token of a long word), nothing is known: no text that fits is ever refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.core.tokenizer_bytes import byte_table

# Bytes that a normal form may make one of at most: it composes four characters, of four bytes each.
CHANGED = 16
CHANGING = {"Lowercase", "NFC", "NFD", "NFKC", "NFKD"}
ADDING = {"Prepend", "ByteLevel"}
KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
CUTTING = {"Split", "Punctuation"}  # where what they cut at stays
VALID = bytes(byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5)  # in UTF-8


class Fewest:
    """Of one tokenizer. Raises nothing for one that cannot be read: nothing is known of it."""

    def __init__(self, tokenizer: Any):
        self.longest = 0  # bytes of a text that a token can stand for; 0: any number
        self.dropped = b""
        if getattr(tokenizer, "is_fast", False):
            self._read(json.loads(tokenizer.backend_tokenizer.to_str()))

    def tokens(self, text: str) -> int:
        """A number of tokens that the text has in any case."""
        if not self.longest:
            return 0
        kept = len(text.encode("utf-8", "replace").translate(None, self.dropped))
        return -(-kept // self.longest)

    def _read(self, told: Mapping[str, Any]) -> None:
        normalizers = _parts(told.get("normalizer"), "normalizers")
        cutters = _parts(told.get("pre_tokenizer"), "pretokenizers")
        added = told.get("added_tokens") or []
        texts = [*_vocabulary(told["model"])]
        by_bytes = any(one["type"] == "ByteLevel" for one in (*normalizers, *cutters))
        dropped = _dropped(told["model"], set(texts), by_bytes)
        changed = any(one["type"] in CHANGING for one in normalizers)
        if (
            dropped is None
            or (changed and dropped)
            or not all(map(_grows, normalizers))
            or not all(map(_keeps, cutters))
            or any(one.get("lstrip") or one.get("rstrip") for one in added)
        ):
            return
        sizes = [len(text) if by_bytes else len(text.encode()) for text in texts]
        sizes += [len(one["content"].encode()) for one in added]
        self.longest = max(4, *sizes) * (CHANGED if changed else 1)  # 4: a character, if unknown
        self.dropped = dropped


def _parts(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """A part of the tokenizer, or those in its sequence."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [inner for one in part[name] for inner in _parts(one, name)]
    return [part]


def _grows(normalizer: Mapping[str, Any]) -> bool:
    """Whether it makes no text shorter, or is a normal form."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode())
    return normalizer["type"] in ADDING | CHANGING


def _keeps(cutter: Mapping[str, Any]) -> bool:
    if cutter["type"] in CUTTING:
        return bool(cutter["behavior"] != "Removed")
    return cutter["type"] in KEEPING


def _vocabulary(model: Mapping[str, Any]) -> Sequence[str]:
    vocabulary = model["vocab"]
    return list(vocabulary) if isinstance(vocabulary, Mapping) else [text for text, _ in vocabulary]


def _dropped(model: Mapping[str, Any], known: set[str], by_bytes: bool) -> bytes | None:
    """Bytes that no token stands for, and that are dropped; None: anything may be dropped or joined
    in one unknown token.
    """
    if model.get("type") not in ("BPE", "Unigram"):
        return None
    if by_bytes and model["type"] == "BPE" and model.get("unk_token") is None:
        written = {byte: character for character, byte in byte_table().items()}
        return bytes(byte for byte in VALID if written[byte] not in known)
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in known for byte in range(256)):
        return b""
    alone = model["type"] == "BPE" and model.get("unk_token") is not None
    return b"" if alone and not model.get("fuse_unk") else None
