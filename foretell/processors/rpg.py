"""Where code goes round in circles, what begins the next round loses probability, and ends gain it.

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
Guarantee: lossy: tokens that repeat code lose probability and ends gain some, on purpose; whatever
drafts, the text has exactly the distribution that this leaves
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
from typing import Annotated

import torch

from foretell.core.processor import About, Processor, Track
from foretell.core.settings import Range
from foretell.core.text import Detokenizer
from foretell.errors import BadConfig
from foretell.processors.lexing import STARTERS, lex_line
from foretell.processors.repeats import Repeats

LARGEST = 14.0  # logarithm of what an end's height is multiplied by at most


@dataclass(frozen=True)
class Rpg(Processor):
    """The settings of the penalty; with decay=1 and boost=1 nothing changes."""

    # of the critical token's height, for each round
    decay: Annotated[float, Range(0, 1, open_low=True)] = 0.9
    # what the heights of ends are divided by, for each round
    boost: Annotated[float, Range(0, 1, open_low=True)] = 0.8
    grace: Annotated[int, Range(0, 1000000)] = 0  # rounds that count for nothing

    @property
    def off(self) -> bool:
        return self.decay == 1 and self.boost == 1

    def start_track(self, about: About) -> Rounds:
        if about.text is None:
            raise BadConfig(
                "rpg: this model has no tokenizer, so its tokens have no text to be lexed; "
                "give a folder that has tokenizer files, or leave rpg out"
            )
        return Rounds(self, about, Detokenizer(about.text))


@dataclass(slots=True)
class Place:
    """The state of reading before a token."""

    window_start: int  # of the detokenizer's window
    window_end: int
    line: str  # of the last line, as far as it goes
    open_quotes: str  # triple quotes that are open
    first_token: int  # the output's token that brought the first letter of that line; -1: none has
    line_count: int


class Rounds(Track):
    """The rounds that an answer has gone, in tokens and in lines."""

    def __init__(self, config: Rpg, about: About, reader: Detokenizer):
        super().__init__()
        self.config = config
        self.about = about
        self.reader = reader
        self.tokens = Repeats()  # of the output
        self.lines = Repeats()  # numbers of lines' symbols
        self.line_starts: list[int] = []  # of each line, as `Place.first_token`
        self.numbers: dict[tuple[str, ...], int] = {}
        self.place = Place(0, 0, "", "", -1, 0)
        self.places_before: list[Place] = []  # each token of the output

    def take_token(self, token: int) -> None:
        if len(self.path) <= self.about.prompt:
            return
        self.places_before.append(self.place)
        unread_text = self.place.line + self.reader.push([token])
        open_quotes, first_token = self.place.open_quotes, self.place.first_token
        token_count = len(self.tokens.items)
        self.tokens.append_item(token)
        *lines, unfinished_line = unread_text.split("\n")
        for line in lines:
            if line.strip():
                line_symbols, open_quotes = lex_line(line, open_quotes)
                self.lines.append_item(self.numbers.setdefault(line_symbols, len(self.numbers)))
                self.line_starts.append(token_count if first_token < 0 else first_token)
            first_token = -1
        if first_token < 0 and unfinished_line.strip():
            first_token = token_count
        reader = self.reader
        self.place = Place(
            reader.start,
            reader.read,
            unfinished_line,
            open_quotes,
            first_token,
            len(self.line_starts),
        )

    def forget_behind(self, length: int) -> None:
        kept_count = max(0, length - self.about.prompt)
        if kept_count < len(self.places_before):
            self.place = self.places_before[kept_count]
            self.reader.start, self.reader.read = self.place.window_start, self.place.window_end
            self.tokens.cut_items(kept_count)
            self.lines.cut_items(self.place.line_count)
            del (
                self.places_before[kept_count:],
                self.line_starts[self.place.line_count :],
                self.reader.tokens[kept_count:],
            )

    def critical_tokens(self) -> dict[int, int]:
        """The tokens that would begin another round, with the rounds there are before the last;
        the one that counts for ends comes last.
        """
        round_counts: dict[int, int] = {}
        length, repeat_count = self.tokens.find_repeat()
        if repeat_count > self.config.grace:
            round_counts[self.tokens.items[-length]] = repeat_count - self.config.grace
        if self.place.first_token < 0:
            length, repeat_count = self.lines.find_repeat()
            if repeat_count > self.config.grace:
                token = self.tokens.items[self.line_starts[-length]]
                round_counts[token] = max(
                    round_counts.pop(token, 0), repeat_count - self.config.grace
                )
        return round_counts

    def warp_scores(self, scores: torch.Tensor) -> torch.Tensor:
        round_counts = self.critical_tokens()
        if not round_counts:
            return scores
        possible_scores = scores[scores > -torch.inf]
        median_score = possible_scores.median() if len(possible_scores) else scores.new_zeros(())
        changed_scores = scores.clone()
        for token, round_count in round_counts.items():
            height = (scores[token] - median_score).clamp(min=0)
            changed_scores[token] -= (1 - self.config.decay**round_count) * height
        if self.begins_statement(token):
            end_factor = math.expm1(min(-round_count * math.log(self.config.boost), LARGEST))
            for end in self.about.ends:
                height = (scores[end] - median_score).clamp(min=0)
                changed_scores[end] += end_factor * height
        return changed_scores

    def begins_statement(self, token: int) -> bool:
        assert self.about.text is not None
        token_text = self.about.text([token])
        stripped_text = token_text.strip()
        return "\n" in token_text or stripped_text in STARTERS or stripped_text.startswith("#")
