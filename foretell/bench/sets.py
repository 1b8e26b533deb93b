"""The prompts of a bench: sets that ship, sets of files, and prompts of a given length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.bench.prompts import Prompt, read_prompts
from foretell.errors import BadConfig
from foretell.ops.assets import ASSETS

if TYPE_CHECKING:
    from foretell.api.lm import LM

PROMPTS = ASSETS / "prompts"
# What ships: chat messages of seven kinds.
SETS = ("chat", "summarisation", "retrieval", "translation", "mathematics", "code", "edits")
MIXED = "mixed"  # the set of prompts that are cut to a context's length
LONG = 4  # how many of these there are
GAP = "\n\n"  # between the texts that one of them is made of


def read_sets(names: Sequence[str | Path]) -> dict[str, list[Prompt]]:
    """Prompt sets by name. `names`: files, or names of sets that ship; none means all of these.

    Raises BadConfig.
    """
    sets: dict[str, list[Prompt]] = {}
    for set_name in names or SETS:
        path = PROMPTS / f"{set_name}.jsonl" if str(set_name) in SETS else Path(set_name)
        if path.stem in sets:
            raise BadConfig(
                f"--prompts {set_name}: there is already a set {path.stem!r}; rename the file"
            )
        sets[path.stem] = read_prompts(path)
    return sets


def prompt_ids(lm: LM, prompt: Prompt) -> list[int]:
    """Token ids of a prompt as `generate` takes it; chat messages are given as text to a model that
    has no chat template.
    """
    if lm.tokenizer is not None and not lm.tokenizer.chat_template:
        prompt = _prompt_text(prompt)
    return lm.prompt_ids(prompt)


def cut_prompts(
    lm: LM, prompts: Sequence[Prompt], context: int, new_tokens: int
) -> list[list[int]]:
    """Prompts of exactly `context` tokens: a few texts, each after as much of the others as fits.

    They end alike whatever the context, so that only its length differs. Nothing is repeated.
    Raises BadConfig where the model or the texts are too short.
    """
    target = lm.models["target"]
    if context + new_tokens > target.context:
        raise BadConfig(
            f"a context of {context} and {new_tokens} new tokens: {target.name} holds "
            f"{target.context}; take less"
        )
    texts = [_prompt_text(prompt) for prompt in prompts]
    ids_by_text = [lm.encode(text, special=False) for text in texts]
    gap_ids = lm.encode(GAP, special=False)
    total_length = sum(map(len, ids_by_text)) + len(gap_ids) * (len(ids_by_text) - 1)
    if total_length < context:
        raise BadConfig(
            f"a context of {context}: all prompts together have {total_length} tokens; "
            "give more or longer ones"
        )
    prefix_ids = lm.encode(texts[0])[
        : -len(ids_by_text[0])
    ]  # what the tokenizer puts before a text
    cut_prompts = []
    prompt_count = min(LONG, len(ids_by_text))
    for prompt_index in range(prompt_count):
        text_index = prompt_index * len(ids_by_text) // prompt_count
        joined_ids: list[int] = []
        for text_ids in [*ids_by_text[text_index + 1 :], *ids_by_text[: text_index + 1]]:
            joined_ids += [*gap_ids, *text_ids] if joined_ids else text_ids
        cut_prompts.append(
            [*prefix_ids, *joined_ids[len(joined_ids) - context + len(prefix_ids) :]]
        )
    return cut_prompts


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return GAP.join(str(message["content"]) for message in prompt)
