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
    for name in names or SETS:
        path = PROMPTS / f"{name}.jsonl" if str(name) in SETS else Path(name)
        if path.stem in sets:
            raise BadConfig(
                f"--prompts {name}: there is already a set {path.stem!r}; rename the file"
            )
        sets[path.stem] = read_prompts(path)
    return sets


def prompt_ids(lm: LM, prompt: Prompt) -> list[int]:
    """Token ids of a prompt as `generate` takes it; chat messages are given as text to a model that
    has no chat template.
    """
    if lm.tokenizer is not None and not lm.tokenizer.chat_template:
        prompt = _text(prompt)
    return lm.prompt_ids(prompt)


def cut(lm: LM, prompts: Sequence[Prompt], context: int, new_tokens: int) -> list[list[int]]:
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
    texts = [_text(prompt) for prompt in prompts]
    ids = [lm.encode(text, special=False) for text in texts]
    gap = lm.encode(GAP, special=False)
    room = sum(map(len, ids)) + len(gap) * (len(ids) - 1)
    if room < context:
        raise BadConfig(
            f"a context of {context}: all prompts together have {room} tokens; "
            "give more or longer ones"
        )
    head = lm.encode(texts[0])[: -len(ids[0])]  # what the tokenizer puts before a text
    made = []
    count = min(LONG, len(ids))
    for k in range(count):
        last = k * len(ids) // count
        whole: list[int] = []
        for text_ids in [*ids[last + 1 :], *ids[: last + 1]]:
            whole += [*gap, *text_ids] if whole else text_ids
        made.append([*head, *whole[len(whole) - context + len(head) :]])
    return made


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return GAP.join(str(message["content"]) for message in prompt)
