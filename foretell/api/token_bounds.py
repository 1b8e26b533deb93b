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
    """Least counts of one tokenizer. Knows nothing, and raises nothing, where it is unreadable."""

    def __init__(self, tokenizer: Any):
        self.longest = 0  # bytes of a text that a token can stand for; 0: any number
        self.dropped = b""
        if getattr(tokenizer, "is_fast", False):
            self._read_tokenizer(json.loads(tokenizer.backend_tokenizer.to_str()))

    def tokens(self, text: str) -> int:
        """A number of tokens that the text has in any case."""
        if not self.longest:
            return 0
        byte_count = len(text.encode("utf-8", "replace").translate(None, self.dropped))
        return -(-byte_count // self.longest)

    def _read_tokenizer(self, description: Mapping[str, Any]) -> None:
        normalizers = _list_parts(description.get("normalizer"), "normalizers")
        cutters = _list_parts(description.get("pre_tokenizer"), "pretokenizers")
        added_tokens = description.get("added_tokens") or []
        texts = [*_list_vocabulary(description["model"])]
        by_bytes = any(component["type"] == "ByteLevel" for component in (*normalizers, *cutters))
        dropped = _dropped_bytes(description["model"], set(texts), by_bytes)
        changed = any(component["type"] in CHANGING for component in normalizers)
        if (
            dropped is None
            or (changed and dropped)
            or not all(map(_never_shortens, normalizers))
            or not all(map(_keeps_text, cutters))
            or any(component.get("lstrip") or component.get("rstrip") for component in added_tokens)
        ):
            return
        sizes = [len(text) if by_bytes else len(text.encode()) for text in texts]
        sizes += [len(component["content"].encode()) for component in added_tokens]
        self.longest = max(4, *sizes) * (CHANGED if changed else 1)  # 4: a character, if unknown
        self.dropped = dropped


def _list_parts(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """A part of the tokenizer, or those in its sequence."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [inner_part for member in part[name] for inner_part in _list_parts(member, name)]
    return [part]


def _never_shortens(normalizer: Mapping[str, Any]) -> bool:
    """Whether it makes no text shorter, or is a normal form."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode())
    return normalizer["type"] in ADDING | CHANGING


def _keeps_text(cutter: Mapping[str, Any]) -> bool:
    if cutter["type"] in CUTTING:
        return bool(cutter["behavior"] != "Removed")
    return cutter["type"] in KEEPING


def _list_vocabulary(model: Mapping[str, Any]) -> Sequence[str]:
    vocabulary = model["vocab"]
    return list(vocabulary) if isinstance(vocabulary, Mapping) else [text for text, _ in vocabulary]


def _dropped_bytes(model: Mapping[str, Any], known_texts: set[str], by_bytes: bool) -> bytes | None:
    """Bytes that no token stands for, and that are dropped; None: anything may be dropped or joined
    in one unknown token.
    """
    if model.get("type") not in ("BPE", "Unigram"):
        return None
    if by_bytes and model["type"] == "BPE" and model.get("unk_token") is None:
        characters = {byte: character for character, byte in byte_table().items()}
        return bytes(byte for byte in VALID if characters[byte] not in known_texts)
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in known_texts for byte in range(256)):
        return b""
    drops_alone = model["type"] == "BPE" and model.get("unk_token") is not None
    return b"" if drops_alone and not model.get("fuse_unk") else None
