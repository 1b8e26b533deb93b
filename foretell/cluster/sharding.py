"""How a batch is cut for several workers: requests that begin alike stay together.

It looks at texts, so that no model is needed where the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretell.batch.prefixes import group_prompts
from foretell.batch.requests import Item

LEAST = 128  # characters that are worth sharing
LARGEST = 64  # requests of a piece at most, so that a worker that dies takes few with it


def cut_batch(items: Sequence[Item], workers: int, largest: int = LARGEST) -> list[list[Item]]:
    """The items in pieces, the largest piece first.

    A group of items with a common prefix is one piece if it is no larger than `largest`, else
    several, each of which computes the prefix once. Small groups share a piece. There are several
    pieces a worker where there are enough items, so that all workers end at about the same time.
    """
    size = max(1, min(largest, len(items) // (4 * workers)))
    item_groups: list[list[Item]] = []
    small_group: list[Item] = []
    for prompt_group in group_prompts(
        [prompt_codes(item.body) for item in items], min_tokens=LEAST
    ):
        members = [items[member] for member in prompt_group.group_members]
        if len(members) < size:
            small_group += members
            if len(small_group) >= size:
                item_groups.append(small_group)
                small_group = []
            continue
        item_groups += [
            members[start : start + largest] for start in range(0, len(members), largest)
        ]
    if small_group:
        item_groups.append(small_group)
    return sorted(item_groups, key=len, reverse=True)


def prompt_codes(body: Mapping[str, Any]) -> list[int]:
    """Numbers that a body's prompt is made of: token ids, or characters of its texts."""
    prompt: Any = body.get("prompt", body.get("messages", ""))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return [token % 2**32 for token in prompt]
    return [ord(character) for character in text_of(prompt)]


def text_of(prompt: Any) -> str:
    """All texts of a prompt, one after the other, whatever it is made of."""
    if isinstance(prompt, Mapping):
        return "\n".join(map(text_of, prompt.values()))
    if isinstance(prompt, list):
        return "\n".join(map(text_of, prompt))
    return str(prompt)
