"""Lists and puzzles to learn from, and a tokenizer for them whose tokens are words.

The questions are those of `bench/suites/parallel/tasks.py`, of the split `train`: ten operations on
lists, Latin squares and sudokus. Half of the lists have names of one word, so that an entry is one
token. An instruction is one token, too: texts are short, and a small model learns to act on them.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretell.bench.sets import prompt_ids
from foretell.bench.suites.parallel.tasks import (
    FIRST,
    LAST,
    LENGTHS,
    SYMBOLS,
    TASKS,
    WORDINGS,
    Item,
    Question,
    written,
)

if TYPE_CHECKING:
    from foretell.api.lm import LM

END, MASK, UNKNOWN = "<|endoftext|>", "<|mask|>", "<|unknown|>"
PUZZLES = ("latin_square", "sudoku")
NAMES = (*WORDINGS, *PUZZLES)
WEIGHTS = {"sort": 3, "reverse": 2, "latin_square": 2, "sudoku": 2}  # of tasks; others: 1
PHRASES = (
    *(TASKS[task].wording for task in NAMES),
    '\n\nList: ["',
    '\nNew: "',
    "\nPosition: ",
    "\nAnswer:",
    "\n\nSymbols: ",
    "\n\nSudoku:\n",
    ' ["',
    '", "',
    '"]',
    '"',
    ", ",
    ",",
    "\n",
)
LONGEST = 64  # positions of a canvas
SHOWN = 0.3  # share of the questions that stand behind an example
ROOM = 0.2  # share of the canvases that are longer than their answer needs


def words() -> list[str]:
    """All tokens, in the order of their numbers."""
    names = [*FIRST, *LAST, *(f" {name}" for name in LAST)]
    return [END, MASK, UNKNOWN, *PHRASES, *dict.fromkeys([*SYMBOLS, "0", *names])]


def tokenizer() -> PreTrainedTokenizerFast:
    """Cuts texts into phrases, words with the space before them, digits and single characters."""
    phrases = "|".join(re.escape(one) for one in sorted(PHRASES, key=len, reverse=True))
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words())}, UNKNOWN))
    pattern = Regex(rf"{phrases}| ?[^\W\d_]+|[\s\S]")
    made.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=END,
        bos_token=END,
        pad_token=END,
        mask_token=MASK,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


@dataclass
class Example:
    """Token ids (n,), of which the first `given` are not to be learnt. `cut`: it goes on behind
    them.
    """

    ids: np.ndarray
    given: int
    cut: bool = False


def single(operation: str, draw: random.Random, length: int) -> Question:
    """A question of this operation about a list whose entries are first names."""
    made = TASKS[operation].made(draw, "train", length)
    names = draw.sample(FIRST, length + 1)
    short = dict(zip((*made.entries, made.new), names, strict=True))
    entries = [short[name] for name in made.entries]
    if operation == "sort":
        answer = sorted(entries)
    else:
        known = re.findall(r'"([^"]*)"', made.answer)
        answer = [short[name] for name in known]
    new = short[made.new] if made.new else ""
    return replace(made, entries=tuple(entries), new=new, answer=written(answer))


def item(task: str, draw: random.Random, one_word: bool = False) -> Item:
    """A question, now and then behind an example."""
    length = draw.choice(LENGTHS)
    made: list[Question] = []
    for _ in range(2):
        if one_word and task not in PUZZLES:
            made.append(single(task, draw, length))
        else:
            made.append(TASKS[task].made(draw, "train", length))
        length = draw.choice(LENGTHS)
    return Item(task, made[0], made[1] if draw.random() < SHOWN else None)


def drawn_item(seed: int, number: int) -> tuple[Item, random.Random]:
    """The question of this number, and what goes on drawing where it stopped."""
    draw = random.Random(f"lists {seed} {number}")
    task = draw.choice([task for task in NAMES for _ in range(WEIGHTS.get(task, 1))])
    return item(task, draw, draw.random() < 0.5), draw


def put_to(lm: LM, count: int, seed: int) -> list[Example]:
    """So many questions in a model's own tokens, asked as the suite `parallel` asks them."""
    found = []
    for number in range(count):
        made, _ = drawn_item(seed, number)
        prompt = prompt_ids(lm, [{"role": "user", "content": made.prompt}])
        turns = lm.tokenizer is not None and lm.tokenizer.chat_template
        answer = made.completion.lstrip() if turns else made.completion
        ids = [*prompt, *lm.encode(answer, special=False)]
        found.append(Example(np.array(ids, np.int64), len(prompt)))
    return found


class Lists:
    """An endless row of examples, each by its number."""

    def __init__(self, seed: int):
        self.seed = seed
        self.tokenizer = tokenizer()
        self.end = self.tokenizer.eos_token_id

    def __getitem__(self, number: int) -> Example:
        made, draw = drawn_item(self.seed, number)
        prompt = self.tokenizer.encode(made.prompt, add_special_tokens=False)
        answer = self.tokenizer.encode(made.completion, add_special_tokens=False)
        room = 1
        if draw.random() < ROOM:
            room = draw.randint(1, max(1, LONGEST - len(answer)))
        return Example(np.array([*prompt, *answer, *[self.end] * room]), len(prompt))
