"""Texts that are asked about one after the other, and mostly differ in a few last tokens."""

from __future__ import annotations

from collections.abc import Sequence


def shared_prefix_length(first_tokens: Sequence[int], second_tokens: Sequence[int]) -> int:
    """Counts the tokens that two lists begin with alike: mostly all but a few."""
    matched_length, upper_length = 0, min(len(first_tokens), len(second_tokens))
    if first_tokens[:upper_length] == second_tokens[:upper_length]:
        return upper_length
    while matched_length + 1 < upper_length:
        middle_length = (matched_length + upper_length) // 2
        if (
            first_tokens[matched_length:middle_length]
            == second_tokens[matched_length:middle_length]
        ):
            matched_length = middle_length
        else:
            upper_length = middle_length
    return matched_length
