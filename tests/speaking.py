"""A model that says what a test has it say, one character a token, in a chat of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from foretell.core.random import Rng
from foretell.core.tokenizer_bytes import Words
from foretell.rewards.questions import Turn
from foretell.testing.toy import Toy

SPECIALS = {"<end>": 0, "<user>": 1, "<assistant>": 2, "<system>": 3}
ROLES = {token: name for name, token in SPECIALS.items()}
VOCAB = 128
NEVER = -60.0  # the logit of a character that is not said
# (what stands before the answer, what is written of it) -> weights of the next character, "" being
# the end of the answer.
Script = Callable[[str, str], Mapping[str, float]]


class Chat(Words):
    """ASCII, with a chat template. `refuses`: a role that it has no place for."""

    chat_template = "one"

    def __init__(self, refuses: str = ""):
        pieces = [bytes([code]) if code > 8 else None for code in range(VOCAB)]
        super().__init__(pieces, SPECIALS, end=0)
        self.refuses = refuses

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        if any(message["role"] == self.refuses for message in messages):
            raise ValueError(f"no {self.refuses}, please")
        return chat([(message["role"], message["content"]) for message in messages])


def chat(turns: Sequence[Turn]) -> str:
    """A conversation as the model is shown it."""
    return "".join(f"<{role}>{said}<end>" for role, said in turns) + "<assistant>"


def spell(tokens: Sequence[int]) -> str:
    """The text of tokens, without special ones."""
    return "".join(chr(token) for token in tokens if token not in ROLES)


def shown(tokens: Sequence[int]) -> str:
    """The same with them."""
    return "".join(ROLES.get(token, chr(token)) for token in tokens)


@lru_cache(maxsize=64)
def before(tokens: bytes) -> str:
    """The question that is read again with every character of its answer."""
    return shown(tokens)


def tokens_of(turns: Sequence[Turn]) -> list[int]:
    """Of a conversation, without any code of the project."""
    found = []
    for role, said in turns:
        found += [SPECIALS[f"<{role}>"], *said.encode("ascii"), SPECIALS["<end>"]]
    return [*found, SPECIALS["<assistant>"]]


class Speaking(Toy):
    """Its law after an answer's beginning is the script's."""

    recipe = None  # type: ignore[assignment]

    def __init__(self, script: Script, name: str = "speaking", refuses: str = "", **toy: Any):
        super().__init__(VOCAB, name=name, **toy)
        self.tokenizer = Chat(refuses)
        self.script = script

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        start = 1 + int(np.flatnonzero(tokens == SPECIALS["<assistant>"])[-1])
        question = before(tokens[:start].astype(np.uint8).tobytes())
        return logits(self.script(question, spell(tokens[start:].astype(int).tolist())))


def logits(weights: Mapping[str, float]) -> np.ndarray:
    row = np.full(VOCAB, NEVER)
    for letter, weight in weights.items():
        row[ord(letter) if letter else 0] = np.log(weight) if weight else NEVER
    return row


def one_of(answers: Mapping[str, float], written: str) -> dict[str, float]:
    """Weights of the next character where whole answers have these."""
    found: dict[str, float] = {}
    for answer, weight in answers.items():
        if answer.startswith(written):
            letter = answer[len(written) : len(written) + 1]
            found[letter] = found.get(letter, 0.0) + weight
    return found or {"": 1.0}


def drawn(row: np.ndarray, temperature: float, rng: Rng, position: int) -> int:
    """The token that a branch draws from these logits, as sampling says it."""
    law = torch.softmax(torch.from_numpy(row) / temperature, -1)
    return rng.sample(law, "target", position)


def said(
    script: Script,
    question: str,
    rng: Rng,
    temperature: float,
    most: int,
    over: Callable[[str], object],
) -> str:
    """An answer, character by character. `over`: whether it ends with what is written."""
    written = ""
    while len(written) < most:
        token = drawn(logits(script(question, written)), temperature, rng, len(written))
        if token == 0:
            break
        written += chr(token)
        if over(written):
            break
    return written
