"""Files that hold a tokenizer alone, and what sentencepiece does with one, slowly."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf as lib

from tests import tiny

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Of the pieces below, some can be made in several ways, and runs of one letter are made of others.
PIECES = (
    "aa ab \u2581a ba aaaa abab \u2581ab aaa xa \u2581\u2581x aab bb == ==== ha hah \u2581ha haha "
    "\u4f60\u597d bab baba lo lol olo e\u0301 \u2581lol"
).split()
LETTERS = "\u2581abxhloe=\u0301\u4f60\u597d"
# What texts are made of: runs, spaces, signs of spaces, bytes, texts of bytes, joined letters.
PARTS = (
    *"abxhloe= \n\t",
    *("aa", "ab", "==", "  ", "   ", "\u2581", "\u2581\u2581", "e\u0301", "\u4f60\u597d", "lol"),
    *("ha", "\U0001f642", "\u05e9\u05dc", "\u202e", "<0x41>", "\r\n", "\0", "[cut]", "\u200d"),
)


def write_file(path: Path, **keys: Any) -> Path:
    """A file of these keys, without `tokenizer.ggml.`; one with a dot is without `tokenizer.`."""
    writer = lib.GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = key.replace("__", ".")
        if value is None:
            continue
        full = f"tokenizer.{name}" if "chat_template" in name else f"tokenizer.ggml.{name}"
        if isinstance(value, list) and value and isinstance(value[0], bytes):
            kinds: tuple[Any, ...] = (lib.GGUFValueType.ARRAY, lib.GGUFValueType.STRING)
        elif isinstance(value, int) and value > 0x7FFFFFFF:
            kinds = (lib.GGUFValueType.UINT32,)
        else:
            kinds = tiny.key_types(value)
        writer.add_key_value(full, value, *kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scored(**more: Any) -> dict[str, Any]:
    """The keys of a vocabulary of sentencepiece, with these in place of the usual ones."""
    special = ["<unk>", "<s>", "</s>", "[cut]", "  ", "   ", "\n", "\n\n"]
    texts = [*special, *BYTES, *PIECES, *LETTERS]
    types = [UNKNOWN, CONTROL, CONTROL, *[USER_DEFINED] * 5, *[BYTE] * 256]
    types += [NORMAL] * (len(texts) - len(types))
    count = len(texts) - len(special) - 256
    scores = [0.0] * (len(special) + 256) + [-float(rank) for rank in range(count)]
    keys = {"model": "llama", "tokens": texts, "token_type": types, "scores": scores}
    return {**keys, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **more}


def texts_of(count: int, seed: int = 0, parts: Sequence[str] = PARTS) -> list[str]:
    """Texts at random."""
    dice = random.Random(seed)
    return ["".join(dice.choice(parts) for _ in range(dice.randint(0, 30))) for _ in range(count)]


class Sentencepiece:
    """The tokens of a text as sentencepiece finds them: of all neighbours that make a piece, those
    of the highest score are joined first, the leftmost of them. Users' tokens are cut out before.
    """

    def __init__(self, keys: Mapping[str, Any], prefix: bool):
        texts, types = keys["tokens"], keys["token_type"]
        self.ids = {
            text.replace(" ", SPACE) if kind == USER_DEFINED else text: token
            for token, (text, kind) in enumerate(zip(texts, types, strict=True))
        }
        self.scores = {
            text: keys["scores"][token]
            for text, token in self.ids.items()
            if types[token] == NORMAL
        }
        self.users = sorted(
            (text for text, token in self.ids.items() if types[token] == USER_DEFINED),
            key=len,
            reverse=True,
        )
        self.beginnings = {user[0] for user in self.users}
        self.by_bytes = BYTE in types
        self.unknown, self.prefix = keys["unknown_token_id"], prefix

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        if self.prefix and text:
            text = SPACE + text
        symbols: list[str | None] = []
        frozen: list[bool] = []
        place = 0
        while place < len(text):
            users = self.users if text[place] in self.beginnings else ()
            user = next((user for user in users if text.startswith(user, place)), None)
            symbols.append(user or text[place])
            frozen.append(user is not None)
            place += len(user or text[place])
        following = [*range(1, len(symbols)), -1]
        preceding = [*range(-1, len(symbols) - 1)]
        agenda: list[tuple[float, int, int, str]] = []

        def consider(left: int, right: int) -> None:
            if left < 0 or right < 0 or frozen[left] or frozen[right]:
                return
            joined = f"{symbols[left]}{symbols[right]}"
            if joined in self.scores:
                heapq.heappush(agenda, (-self.scores[joined], left, right, joined))

        for left in range(len(symbols) - 1):
            consider(left, left + 1)
        while agenda:
            _, left, right, joined = heapq.heappop(agenda)
            if None in (symbols[left], symbols[right]):
                continue
            if f"{symbols[left]}{symbols[right]}" != joined or following[left] != right:
                continue
            symbols[left], symbols[right] = joined, None
            following[left] = following[right]
            if following[left] >= 0:
                preceding[following[left]] = left
            consider(preceding[left], left)
            consider(left, following[left])
        return self._write(symbols)

    def _write(self, symbols: Sequence[str | None]) -> list[int]:
        tokens: list[int] = []
        for symbol in symbols:
            if symbol is None:
                continue
            if symbol in self.ids:
                tokens.append(self.ids[symbol])
            elif self.by_bytes:
                tokens += [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            elif tokens[-1:] != [self.unknown]:  # a run of them is one
                tokens.append(self.unknown)
        return tokens
