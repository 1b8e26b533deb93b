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

from foretell.train.corpus import held_out, read_documents

SHORTEST, LONGEST = 5, 40  # words of a sentence
ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")  # between two sentences
PROSE = re.compile(r"[A-Z][\w ,;:'()\-]*\w[.!?]")  # what a sentence is made of
ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")  # of a keyboard
NEIGHBOURS: dict[str, str] = {}
for keys in ROWS:
    for left, right in pairwise(keys):
        NEIGHBOURS[left] = NEIGHBOURS.get(left, "") + right
        NEIGHBOURS[right] = NEIGHBOURS.get(right, "") + left


def read_sentences(sources: list[str], share: float) -> Iterator[tuple[str, bool]]:
    """(sentence, whether its document is held back), each sentence once. Raises BadConfig.

    `sources`: as of corpus.documents; `share`: of the documents that are held back.
    """
    seen_sentences: set[str] = set()
    for source in sources:
        for name, text in read_documents(source):
            is_held_back = held_out(name, share)
            for sentence in split_sentences(prose_paragraphs(name, text)):
                if sentence not in seen_sentences:
                    seen_sentences.add(sentence)
                    yield sentence, is_held_back


def prose_paragraphs(name: str, text: str) -> list[str]:
    """The paragraphs of a document; of a Python source those of its docstrings."""
    doc_texts = [text]
    if name.endswith(".py"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of strange escapes in what is read
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return []
        doc_kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        doc_nodes = [node for node in ast.walk(tree) if isinstance(node, doc_kinds)]
        doc_texts = [ast.get_docstring(node) or "" for node in doc_nodes]
    return [paragraph for part in doc_texts for paragraph in part.split("\n\n")]


def split_sentences(paragraphs: list[str]) -> Iterator[str]:
    """Yields sentences of paragraphs: plain words with punctuation, neither short nor long."""
    for paragraph in paragraphs:
        for sentence in ENDS.split(" ".join(paragraph.split())):
            words = sentence.count(" ") + 1
            if SHORTEST <= words <= LONGEST and sentence.isascii() and PROSE.fullmatch(sentence):
                yield sentence


def spoil_sentence(sentence: str, rate: float, seed: int, round: int = 0) -> str:
    """The sentence with mistakes: each of its words has one with probability `rate`."""
    generator = random.Random(f"{seed} {round} {sentence}")
    words = []
    for word in sentence.split(" "):
        if generator.random() >= rate:
            words.append(word)
            continue
        chance = generator.random()
        if chance < 0.2:
            continue  # left out
        if chance < 0.3:
            words.append(word)
            words.append(word)
        else:
            words.append(mistype_word(word, generator))
    return " ".join(words) or sentence


def mistype_word(word: str, generator: random.Random) -> str:
    """The word with one slip of a finger."""
    position = generator.randrange(len(word))
    preceding, letter, following = word[:position], word[position], word[position + 1 :]
    mistake_kind = generator.randrange(4)
    if mistake_kind == 0 and following:
        return preceding + following[0] + letter + following[1:]
    if mistake_kind == 1 and len(word) > 1:
        return preceding + following
    if mistake_kind == 2 and letter in NEIGHBOURS:
        return preceding + generator.choice(NEIGHBOURS[letter]) + following
    return preceding + letter + letter + following
