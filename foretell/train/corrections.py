"""A correction task made from texts that are here: sentences, and the same with mistakes.

Sentences come from the prose of documents (of Python sources their docstrings). Mistakes are those
of hasty typing: letters swapped, left out, doubled or hit beside, words left out or written twice.
The mistakes of a sentence depend on it, the seed and the round alone, so that each round over the
sentences has others and every machine the same.
"""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise

from foretell.train.corpus import documents, held_out

SHORTEST, LONGEST = 5, 40  # words of a sentence
ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")  # between two sentences
PROSE = re.compile(r"[A-Z][\w ,;:'()\-]*\w[.!?]")  # what a sentence is made of
ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")  # of a keyboard
NEIGHBOURS: dict[str, str] = {}
for keys in ROWS:
    for left, right in pairwise(keys):
        NEIGHBOURS[left] = NEIGHBOURS.get(left, "") + right
        NEIGHBOURS[right] = NEIGHBOURS.get(right, "") + left


def sentences(sources: list[str], share: float) -> Iterator[tuple[str, bool]]:
    """(sentence, whether its document is held back), each sentence once. Raises BadConfig.

    `sources`: as of corpus.documents; `share`: of the documents that are held back.
    """
    seen: set[str] = set()
    for source in sources:
        for name, text in documents(source):
            back = held_out(name, share)
            for sentence in split(prose(name, text)):
                if sentence not in seen:
                    seen.add(sentence)
                    yield sentence, back


def prose(name: str, text: str) -> list[str]:
    """The paragraphs of a document; of a Python source those of its docstrings."""
    parts = [text]
    if name.endswith(".py"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of strange escapes in what is read
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return []
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        parts = [ast.get_docstring(node) or "" for node in nodes]
    return [paragraph for part in parts for paragraph in part.split("\n\n")]


def split(paragraphs: list[str]) -> Iterator[str]:
    """The sentences among them: plain words with their punctuation, neither short nor long."""
    for paragraph in paragraphs:
        for sentence in ENDS.split(" ".join(paragraph.split())):
            words = sentence.count(" ") + 1
            if SHORTEST <= words <= LONGEST and sentence.isascii() and PROSE.fullmatch(sentence):
                yield sentence


def spoiled(sentence: str, rate: float, seed: int, round: int = 0) -> str:
    """The sentence with mistakes: each of its words has one with chance `rate`."""
    draw = random.Random(f"{seed} {round} {sentence}")
    words = []
    for word in sentence.split(" "):
        if draw.random() >= rate:
            words.append(word)
            continue
        kind = draw.random()
        if kind < 0.2:
            continue  # left out
        if kind < 0.3:
            words.append(word)
            words.append(word)
        else:
            words.append(mistyped(word, draw))
    return " ".join(words) or sentence


def mistyped(word: str, draw: random.Random) -> str:
    """The word with one slip of a finger."""
    at = draw.randrange(len(word))
    before, letter, behind = word[:at], word[at], word[at + 1 :]
    kind = draw.randrange(4)
    if kind == 0 and behind:
        return before + behind[0] + letter + behind[1:]
    if kind == 1 and len(word) > 1:
        return before + behind
    if kind == 2 and letter in NEIGHBOURS:
        return before + draw.choice(NEIGHBOURS[letter]) + behind
    return before + letter + letter + behind
