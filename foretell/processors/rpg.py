"""Where code goes round in circles, what would begin the next round loses chance, an end gains it.

A round is found in two ways. By content: the answer ends with a stretch of tokens that stands right
before it already, n times; of such stretches the shortest counts. By structure: a lexer makes
symbols of every line (keywords and operators stay, each name, number, string, comment and list is
one symbol), the answer's last lines are, in symbols, those right before them, and a new line
begins. The critical token is the first one of the last round, since it would begin another. Its
logit's height above the row's median is multiplied by decay^n. Where the critical token begins a
statement or is a line end, the heights of the tokens that end the text are divided by boost^n. Of
the text nothing is read again: tokens and lines are taken in one by one, and taken back.

Paper: Dong et al., Rethinking Repetition Problems of LLMs in Code Generation (grammar-based
repetition penalization), arXiv:2505.10402
Guarantee: lossy: tokens that repeat code lose chance and ends gain some, on purpose; whatever
drafts, the text has exactly the law that this leaves
Cost: target 1
Needs: a tokenizer
Trains: nothing
Differs:
- logits are measured from the row's median, where the paper's code multiplies and divides them as
they are, which raises a negative logit that is to fall
- n counts rounds by structure too, where that code begins at 1 in every step, and its lines may
repeat by a cycle of any length
- blank lines belong to no structure; a line inside a text in triple quotes repeats only one with
the same words; brackets that stay open at the end of a line are no list
- a token that ends a line and begins the next one with more than spaces is not looked up by
structure, since the line is not complete before it
- `grace` rounds may be let pass, for tables and imports
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from foretell.core.processor import About, Track, Warper
from foretell.core.text import Detokenizer
from foretell.errors import BadConfig
from foretell.processors.lexing import STARTERS, symbols
from foretell.processors.repeats import Repeats

LARGEST = 14.0  # logarithm of what an end's height is multiplied by at most


@dataclass(frozen=True)
class Rpg(Warper):
    """With decay=1 and boost=1 it changes nothing."""

    decay: float = 0.9  # of the critical token's height, for each round
    boost: float = 0.8  # what the heights of ends are divided by, for each round
    grace: int = 0  # rounds that count for nothing

    def __post_init__(self) -> None:
        for name in ("decay", "boost"):
            if not 0 < getattr(self, name) <= 1:
                raise BadConfig.field(f"rpg:{name}", getattr(self, name), "above 0, at most 1")
        if not 0 <= self.grace <= 1_000_000:
            raise BadConfig.field("rpg:grace", self.grace, "between 0 and 1000000")

    @property
    def off(self) -> bool:
        return self.decay == 1 and self.boost == 1

    def track(self, about: About) -> Rounds:
        if about.text is None:
            raise BadConfig(
                "rpg: this model has no tokenizer, so its tokens have no text to be lexed; "
                "give a folder that has tokenizer files, or leave rpg out"
            )
        return Rounds(self, about, Detokenizer(about.text))


@dataclass(slots=True)
class Place:
    """How far the text was read before a token."""

    start: int  # of the detokenizer's window
    read: int
    line: str  # of the last line, as far as it goes
    inside: str  # triple quotes that are open
    begun: int  # the output's token that brought the first letter of that line; -1: none has
    lines: int


class Rounds(Track):
    """The rounds that an answer has gone, in tokens and in lines."""

    def __init__(self, config: Rpg, about: About, reader: Detokenizer):
        super().__init__()
        self.config = config
        self.about = about
        self.reader = reader
        self.tokens = Repeats()  # of the output
        self.lines = Repeats()  # numbers of lines' symbols
        self.starts: list[int] = []  # of each line, as `Place.begun`
        self.numbers: dict[tuple[str, ...], int] = {}
        self.place = Place(0, 0, "", "", -1, 0)
        self.before: list[Place] = []  # each token of the output

    def push(self, token: int) -> None:
        if len(self.path) <= self.about.prompt:
            return
        self.before.append(self.place)
        text = self.place.line + self.reader.push([token])
        inside, begun = self.place.inside, self.place.begun
        here = len(self.tokens.items)
        self.tokens.push(token)
        *lines, rest = text.split("\n")
        for line in lines:
            if line.strip():
                found, inside = symbols(line, inside)
                self.lines.push(self.numbers.setdefault(found, len(self.numbers)))
                self.starts.append(here if begun < 0 else begun)
            begun = -1
        if begun < 0 and rest.strip():
            begun = here
        reader = self.reader
        self.place = Place(reader.start, reader.read, rest, inside, begun, len(self.starts))

    def cut(self, length: int) -> None:
        kept = max(0, length - self.about.prompt)
        if kept < len(self.before):
            self.place = self.before[kept]
            self.reader.start, self.reader.read = self.place.start, self.place.read
            self.tokens.cut(kept)
            self.lines.cut(self.place.lines)
            del self.before[kept:], self.starts[self.place.lines :], self.reader.tokens[kept:]

    def critical(self) -> dict[int, int]:
        """The tokens that would begin another round, with the rounds there are before the last;
        the one that counts for ends comes last.
        """
        found: dict[int, int] = {}
        length, times = self.tokens.found()
        if times > self.config.grace:
            found[self.tokens.items[-length]] = times - self.config.grace
        if self.place.begun < 0:
            length, times = self.lines.found()
            if times > self.config.grace:
                token = self.tokens.items[self.starts[-length]]
                found[token] = max(found.pop(token, 0), times - self.config.grace)
        return found

    def warped(self, scores: torch.Tensor) -> torch.Tensor:
        found = self.critical()
        if not found:
            return scores
        possible = scores[scores > -torch.inf]
        middle = possible.median() if len(possible) else scores.new_zeros(())
        warped = scores.clone()
        for token, times in found.items():
            height = (scores[token] - middle).clamp(min=0)
            warped[token] -= (1 - self.config.decay**times) * height
        if self.begins_statement(token):
            factor = math.expm1(min(-times * math.log(self.config.boost), LARGEST))
            for end in self.about.ends:
                height = (scores[end] - middle).clamp(min=0)
                warped[end] += factor * height
        return warped

    def begins_statement(self, token: int) -> bool:
        assert self.about.text is not None
        text = self.about.text([token])
        word = text.strip()
        return "\n" in text or word in STARTERS or word.startswith("#")
