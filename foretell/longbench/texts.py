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
def shipped() -> tuple[str, ...]:
    """The sentences of the passages that ship."""
    lines = (ASSETS / "texts" / "passages.jsonl").read_text("utf-8").splitlines()
    return tuple(sentence for line in lines for sentence in ENDS.split(json.loads(line)["text"]))


def filler(draw: random.Random) -> Iterator[str]:
    """Sentences that answer no question, without end: those that ship in some order, and made ones
    among and behind them.
    """
    known = draw.sample(shipped(), len(shipped()))
    while True:
        if known and draw.random() < 0.5:
            yield known.pop()
        else:
            yield " ".join(map(draw.choice, (WHO, DID, WHAT, WHEN))) + "."


def filled(sentences: Iterator[str], tokens: int, counted: Counted) -> list[str]:
    """The first sentences that have at most so many tokens together."""
    found: list[str] = []
    left = tokens
    while True:
        sentence = next(sentences)
        left -= counted(f" {sentence}")
        if left < 0:
            return found
        found.append(sentence)


def planted(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """A text with these sentences (depth, sentence) among the others; depth 0 is its beginning, 1
    its end.
    """
    text = list(sentences)
    for depth, needle in sorted(needles, reverse=True):
        text.insert(round(depth * len(sentences)), needle)
    return " ".join(text)


def letters(draw: random.Random, count: int) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=count))


def apart(draw: random.Random, count: int) -> list[str]:
    """Names of different things, such as `silver harp`; numbered ones where words do not do."""
    pairs = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    names = draw.sample(pairs, len(pairs))
    while len(names) < count:
        names += [f"{pair} {len(names) // len(pairs) + 1}" for pair in pairs]
    return names[:count]
