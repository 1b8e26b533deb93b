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
    FIRST_NAMES,
    LAST_NAMES,
    LENGTHS,
    SYMBOLS,
    TASKS,
    WORDINGS,
    Item,
    Question,
    format_list,
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
SHOWN = 0.3  # share of the questions that follow an example
ROOM = 0.2  # share of the canvases that are longer than their answer needs


def list_tokens() -> list[str]:
    """Lists all tokens in the order of their numbers."""
    names = [*FIRST_NAMES, *LAST_NAMES, *(f" {name}" for name in LAST_NAMES)]
    return [END, MASK, UNKNOWN, *PHRASES, *dict.fromkeys([*SYMBOLS, "0", *names])]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Cuts texts into phrases, words with the space before them, digits and single characters."""
    phrases = "|".join(re.escape(phrase) for phrase in sorted(PHRASES, key=len, reverse=True))
    word_tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(list_tokens())}, UNKNOWN)
    )
    pattern = Regex(rf"{phrases}| ?[^\W\d_]+|[\s\S]")
    word_tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    word_tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer,
        eos_token=END,
        bos_token=END,
        pad_token=END,
        mask_token=MASK,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


@dataclass
class Example:
    """Token ids (n,), of which the first `given` are not to be learnt. `cut`: it goes on after
    them.
    """

    ids: np.ndarray
    given_count: int
    is_cut: bool = False


def one_word_question(operation: str, generator: random.Random, length: int) -> Question:
    """A question of this operation about a list whose entries are first names."""
    question = TASKS[operation].made(generator, "train", length)
    names = generator.sample(FIRST_NAMES, length + 1)
    short_names = dict(zip((*question.entries, question.new), names, strict=True))
    entries = [short_names[name] for name in question.entries]
    if operation == "sort":
        answer = sorted(entries)
    else:
        answer_names = re.findall(r'"([^"]*)"', question.answer)
        answer = [short_names[name] for name in answer_names]
    new_entry = short_names[question.new] if question.new else ""
    return replace(question, entries=tuple(entries), new=new_entry, answer=format_list(answer))


def draw_item(task: str, generator: random.Random, one_word: bool = False) -> Item:
    """A question, now and then after an example."""
    list_length = generator.choice(LENGTHS)
    questions: list[Question] = []
    for _ in range(2):
        if one_word and task not in PUZZLES:
            questions.append(one_word_question(task, generator, list_length))
        else:
            questions.append(TASKS[task].made(generator, "train", list_length))
        list_length = generator.choice(LENGTHS)
    return Item(task, questions[0], questions[1] if generator.random() < SHOWN else None)


def seeded_item(seed: int, number: int) -> tuple[Item, random.Random]:
    """The question of this number, and what goes on drawing where it stopped."""
    generator = random.Random(f"lists {seed} {number}")
    task = generator.choice([task for task in NAMES for _ in range(WEIGHTS.get(task, 1))])
    return draw_item(task, generator, generator.random() < 0.5), generator


def model_questions(lm: LM, count: int, seed: int) -> list[Example]:
    """Draws `count` questions in a model's own tokens, asked as the suite `parallel` does."""
    examples = []
    for number in range(count):
        drawn_item, _ = seeded_item(seed, number)
        prompt = prompt_ids(lm, [{"role": "user", "content": drawn_item.prompt}])
        has_template = lm.tokenizer is not None and lm.tokenizer.chat_template
        answer = drawn_item.completion.lstrip() if has_template else drawn_item.completion
        ids = [*prompt, *lm.encode(answer, special=False)]
        examples.append(Example(np.array(ids, np.int64), len(prompt)))
    return examples


class Lists:
    """An endless row of examples, each by its number."""

    def __init__(self, seed: int):
        self.seed = seed
        self.tokenizer = build_tokenizer()
        self.end = self.tokenizer.eos_token_id

    def __getitem__(self, number: int) -> Example:
        drawn_item, generator = seeded_item(self.seed, number)
        prompt = self.tokenizer.encode(drawn_item.prompt, add_special_tokens=False)
        answer = self.tokenizer.encode(drawn_item.completion, add_special_tokens=False)
        end_count = 1
        if generator.random() < ROOM:
            end_count = generator.randint(1, max(1, LONGEST - len(answer)))
        return Example(np.array([*prompt, *answer, *[self.end] * end_count]), len(prompt))
