"""Values of a .gguf header that no model can have: numbers beyond what the file's tensors hold,
lists of other lengths than the vocabulary, texts where numbers are read.

Only what is wrong in every family is refused here, so that a family that is computed nowhere here
is still left to llama.cpp, which trusts what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST_LAYERS = 1024
LONGEST = 1 << 31  # tokens of a context, below
WIDEST = 1 << 16  # numbers of a head; heads
# Whole numbers of an architecture, by their keys without its name: the least and the most.
WHOLE: dict[str, tuple[int, int]] = {
    "block_count": (1, MOST_LAYERS),
    "context_length": (1, LONGEST),
    "embedding_length": (1, LONGEST),
    "feed_forward_length": (0, LONGEST),
    "expert_feed_forward_length": (0, LONGEST),
    "expert_count": (0, WIDEST),
    "expert_used_count": (0, WIDEST),
    "vocab_size": (1, LONGEST),
    "attention.head_count": (0, WIDEST),
    "attention.head_count_kv": (0, WIDEST),
    "attention.key_length": (1, WIDEST),
    "attention.value_length": (1, WIDEST),
    "attention.sliding_window": (0, LONGEST),
    "rope.dimension_count": (0, WIDEST),
    "rope.scaling.original_context_length": (0, LONGEST),
}
# Those that may be lists of one number for each layer.
BY_LAYER = frozenset(("feed_forward_length", "attention.head_count", "attention.head_count_kv"))
# Those that are a side of a matrix, and by how much that may be shorter: gates halve some.
SIDES = {"embedding_length": 1, "feed_forward_length": 2}
# Numbers with a fraction: the least and the most, and whether the least is one of them.
FRACTIONS: dict[str, tuple[float, float, bool]] = {
    "attention.layer_norm_epsilon": (0.0, 1.0, True),
    "attention.layer_norm_rms_epsilon": (0.0, 1.0, True),
    "rope.freq_base": (0.0, math.inf, False),
    "rope.freq_base_swa": (0.0, math.inf, False),
    "rope.scale_linear": (0.0, math.inf, True),
    "rope.scaling.factor": (0.0, math.inf, True),
    "rope.scaling.attn_factor": (0.0, math.inf, False),
}
TEXTS = ("rope.scaling.type",)
TOKENS = "tokenizer.ggml."
TOKEN_TEXTS = ("model", "pre")
TOKEN_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
TOKEN_IDS = tuple(f"{name}_token_id" for name in "bos eos eot eom unknown padding".split())
TOKEN_LISTS = {"tokens": str, "merges": str, "scores": float, "token_type": int}
# Keys of the tokenizer that have values of one type, and what a user calls it.
TOKEN_VALUES: tuple[tuple[tuple[str, ...], type, str], ...] = (
    (TOKEN_TEXTS, str, "text"),
    (TOKEN_FLAGS, bool, "yes or no"),
    (TOKEN_IDS, int, "whole number"),
    (tuple(TOKEN_LISTS), list, "list"),
)
ENTRIES = {str: "texts", float: "numbers", int: "numbers"}
NO_TOKEN = (-1, (1 << 32) - 1)  # ids that say that there is none
WORDLESS = ("none", "no_vocab")  # kinds of tokenizers that have no words


def check_values(
    values: Mapping[str, Any],
    lengths: Mapping[str, int],
    entry_types: Mapping[str, type],
    tensors: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises ValueError with the first value that cannot be.

    `lengths`, `entry_types`: how many values each list has, and what they are; `tensors`: sizes by
    name.
    """
    if values.get("split.no"):  # a further part of a model, whose first one says all of this
        return
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture.isprintable() or not architecture:
        raise ValueError("general.architecture names no family")
    _check_architecture(f"{architecture}.", values, lengths, tensors)
    _check_tokenizer(values, lengths, entry_types)


def _check_architecture(
    prefix: str,
    values: Mapping[str, Any],
    lengths: Mapping[str, int],
    tensors: Mapping[str, tuple[int, ...]],
) -> None:
    layer_count = values.get(f"{prefix}block_count")
    longest_side = max((max(sizes) for sizes in tensors.values()), default=LONGEST)
    for name, (least, most) in WHOLE.items():
        key = f"{prefix}{name}"
        if key in lengths and (name not in BY_LAYER or lengths[key] != layer_count):
            raise ValueError(f"{key} is a list of {lengths[key]}")
        if key not in values:
            continue
        value = values[key]
        if type(value) is not int:
            raise ValueError(f"{key} is {_shorten(value)}, and no whole number")
        _check_range(key, value, least <= value <= most)
        if value > longest_side * SIDES.get(name, LONGEST):
            raise ValueError(f"{key} is {value}, and its tensors have no such side")
    for key, value in values.items():
        if key.startswith(prefix):
            _check_fraction(key, key.removeprefix(prefix), value)
    for name in (*FRACTIONS, *TEXTS):
        if f"{prefix}{name}" in lengths:
            raise ValueError(f"{prefix}{name} is a list")
    _check_heads(prefix, values, longest_side)


def _check_fraction(key: str, name: str, value: Any) -> None:
    if name in TEXTS and not isinstance(value, str):
        raise ValueError(f"{key} is {_shorten(value)}, and no text")
    if name not in FRACTIONS:
        _check_range(key, value, not isinstance(value, float) or math.isfinite(value))
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{key} is {_shorten(value)}, and no number")
    least, most, is_least_allowed = FRACTIONS[name]
    _check_range(key, value, least < value < most or (is_least_allowed and value == least))


def _check_heads(prefix: str, values: Mapping[str, Any], longest_side: int) -> None:
    """Heads beyond what any tensor holds, where the header says how many there are and how wide."""
    width = values.get(f"{prefix}attention.key_length")
    for name in ("attention.head_count", "attention.head_count_kv"):
        count = values.get(f"{prefix}{name}")
        if width is not None and count is not None and count * width > 2 * longest_side:
            raise ValueError(f"{prefix}{name} is {count}, and its tensors have no such side")


def _check_range(key: str, value: Any, is_inside: bool) -> None:
    if not is_inside:
        raise ValueError(f"{key} is {_shorten(value)}, which cannot be")


def _check_tokenizer(
    values: Mapping[str, Any], lengths: Mapping[str, int], entry_types: Mapping[str, type]
) -> None:
    for names, value_type, meaning in TOKEN_VALUES:
        for name in names:
            key = f"{TOKENS}{name}"
            key_type = list if key in lengths else type(values.get(key, value_type()))
            if key_type is not value_type:
                found = _shorten(values[key]) if key in values else "a list"
                raise ValueError(f"{key} is {found}, and no {meaning}")
    for name, entry_type in TOKEN_LISTS.items():
        key = f"{TOKENS}{name}"
        if lengths.get(key) and entry_types[key] is not entry_type:
            raise ValueError(f"{key} is no list of {ENTRIES[entry_type]}")
    word_count = lengths.get(f"{TOKENS}tokens", 0)
    if lengths.get(f"{TOKENS}tokens") == 0 and values.get(f"{TOKENS}model") not in WORDLESS:
        raise ValueError(f"{TOKENS}tokens has no words")
    for name in ("scores", "token_type"):
        key = f"{TOKENS}{name}"
        if word_count and lengths.get(key, word_count) != word_count:
            words = f"{TOKENS}tokens has {word_count}"
            raise ValueError(f"{key} has {lengths[key]} numbers, and {words}")
    for name in TOKEN_IDS if word_count else ():
        token = values.get(f"{TOKENS}{name}", 0)
        if not 0 <= token < word_count and token not in NO_TOKEN:
            tokens = f"the tokens 0 to {word_count - 1}"
            raise ValueError(f"{TOKENS}{name} is {token}, and the file has {tokens}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
