"""Words and sentences that tasks are made of, drawn by a seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from foretell.ops.assets import ASSETS

COLOURS = ("amber", "azure", "coral", "ivory", "jade", "scarlet", "silver", "violet")
THINGS = ("anchor", "basket", "candle", "drum", "harp", "kettle", "lantern", "ladder", "mirror",
          "needle", "pillow", "saddle", "teapot", "trumpet", "umbrella", "wagon")  # fmt: skip
NAMES = ("Agnes", "Boris", "Clara", "Dmitri", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas",
         "Karin", "Lukas", "Marta", "Nils", "Olga", "Pavel")  # fmt: skip
TRADES = ("baker", "carpenter", "dentist", "farmer", "gardener", "lawyer", "miner", "nurse",
          "painter", "plumber", "sailor", "tailor", "teacher", "weaver")  # fmt: skip
TOWNS = ("Bergen", "Cork", "Delft", "Florence", "Geneva", "Hamburg", "Krakow", "Lisbon", "Malmo",
         "Porto", "Riga", "Seville", "Turin", "Vienna")  # fmt: skip
# Of sentences that are made when those that ship are used up.
WHO = ("The ferryman", "A visitor", "The schoolmaster", "The old clerk", "A neighbour",
       "The postman", "The choir", "Somebody", "The miller", "A stranger")  # fmt: skip
DID = ("waited for", "talked about", "walked past", "wrote down", "forgot", "remembered",
       "looked for", "complained about", "laughed at", "pointed at")  # fmt: skip
WHAT = ("the broken gate", "the last train", "the new roof", "a grey horse", "the empty market",
        "the long winter", "the church bell", "a pair of boots", "the muddy road",
        "a bowl of soup")  # fmt: skip
WHEN = ("before breakfast", "on Tuesday", "in the rain", "after the concert", "for an hour",
        "without a word", "once more", "late at night", "at noon", "in early spring")  # fmt: skip
ENDS = re.compile(r"(?<=[.!?]) ")  # of sentences
Counted = Callable[[str], int]  # tokens of a text


@cache
def shipped_sentences() -> tuple[str, ...]:
    """The sentences of the passages that ship."""
    passage_lines = (ASSETS / "texts" / "passages.jsonl").read_text("utf-8").splitlines()
    return tuple(
        sentence for line in passage_lines for sentence in ENDS.split(json.loads(line)["text"])
    )


def draw_sentences(random_source: random.Random) -> Iterator[str]:
    """Yields sentences that answer no question, without end: those that ship in some order, and
    made ones among and after them.
    """
    shipped_order = random_source.sample(shipped_sentences(), len(shipped_sentences()))
    while True:
        if shipped_order and random_source.random() < 0.5:
            yield shipped_order.pop()
        else:
            yield " ".join(map(random_source.choice, (WHO, DID, WHAT, WHEN))) + "."


def fill_sentences(sentences: Iterator[str], tokens: int, count_tokens: Counted) -> list[str]:
    """Takes the first sentences that have at most so many tokens together."""
    filled_sentences: list[str] = []
    remaining_tokens = tokens
    while True:
        sentence = next(sentences)
        remaining_tokens -= count_tokens(f" {sentence}")
        if remaining_tokens < 0:
            return filled_sentences
        filled_sentences.append(sentence)


def plant_needles(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """Joins a text with these sentences (depth, sentence) among the others; depth 0 is its
    beginning, 1 its end.
    """
    planted_sentences = list(sentences)
    for depth, needle in sorted(needles, reverse=True):
        planted_sentences.insert(round(depth * len(sentences)), needle)
    return " ".join(planted_sentences)


def draw_letters(random_source: random.Random, count: int) -> str:
    return "".join(random_source.choices("abcdefghijklmnopqrstuvwxyz", k=count))


def draw_names(random_source: random.Random, count: int) -> list[str]:
    """Draws names of different things, such as `silver harp`; numbered ones where words do
    not do.
    """
    thing_names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    drawn_names = random_source.sample(thing_names, len(thing_names))
    while len(drawn_names) < count:
        drawn_names += [
            f"{pair} {len(drawn_names) // len(thing_names) + 1}" for pair in thing_names
        ]
    return drawn_names[:count]
