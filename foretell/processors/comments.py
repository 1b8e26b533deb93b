"""Where a block of Python begins, it begins with a comment.

After a line that opens a block (`for ...:`, `else:`, `def ...:` and so on), and after a docstring
that follows one, tokens that begin a comment gain `boost` in their logits, as long as nothing but
spaces stands in the new line. So do tokens of spaces alone, so that a comment is indented as the
model would indent code. The prompt's lines count as the answer's do, so that an answer that begins
inside a block begins with a comment as well.

Paper: Chen et al., Comments as Natural Logic Pivots: Improve Code Generation via Comment
Perspective, arXiv:2404.07549
Guarantee: lossy: blocks begin with other tokens, on purpose; whatever drafts, the text has exactly
the distribution that this leaves
Cost: target 1
Needs: a tokenizer
Trains: nothing
Differs:
- the paper asks for comments by a cue alone, see `mango`; this is an extension of it
- tokens that begin a comment are looked for among the 1,000 best of a row
- Python only; lines in brackets and in texts that look like code are taken for code
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from foretell.core.processor import About, Processor, Track
from foretell.core.settings import Range
from foretell.core.text import Detokenizer
from foretell.errors import BadConfig

OPENS = re.compile(
    r"\s*(async|case|class|def|elif|else|except|finally|for|if|match|try|while|with)\b"
    r"[^#]*:\s*(#.*)?"
)
QUOTES = re.compile(r"\s*[rRuU]?(\"\"\"|''')")
LOOKED_AT = 1000  # tokens of a row


@dataclass(frozen=True)
class Comments(Processor):
    """The settings of comments; with boost=0 nothing changes."""

    boost: Annotated[float, Range(0, 1000)] = 50.0  # of the logits of comments and of spaces

    @property
    def off(self) -> bool:
        return not self.boost

    def start_track(self, about: About) -> Blocks:
        if about.text is None:
            raise BadConfig(
                "comments: this model has no tokenizer, so its tokens have no text to be read; "
                "give a folder that has tokenizer files, or leave comments out"
            )
        return Blocks(self.boost, Detokenizer(about.text))


@dataclass(frozen=True)
class Place:
    """The state of reading after a token, and what may follow."""

    window_start: int = 0  # of the detokenizer's window
    window_end: int = 0
    line: str = ""  # the last line, as far as it goes
    block_opened: bool = False  # whether a block was opened that nothing stands in yet
    open_quotes: str = ""  # triple quotes of a docstring that are open


class Blocks(Track):
    """The blocks of a text, as its lines open them."""

    def __init__(self, boost: float, reader: Detokenizer):
        super().__init__()
        self.boost = boost
        self.reader = reader
        self.places = [Place()]  # before the text, and after each token
        self.texts: dict[int, str] = {}  # of tokens that were looked at

    def take_token(self, token: int) -> None:
        current_place = self.places[-1]
        *lines, unfinished_line = (current_place.line + self.reader.push([token])).split("\n")
        for line in lines:
            current_place = read_line(current_place, line)
        reader = self.reader
        self.places.append(
            replace(
                current_place,
                window_start=reader.start,
                window_end=reader.read,
                line=unfinished_line,
            )
        )

    def forget_behind(self, length: int) -> None:
        del self.places[length + 1 :], self.reader.tokens[length:]
        self.reader.start, self.reader.read = (
            self.places[-1].window_start,
            self.places[-1].window_end,
        )

    def warp_scores(self, scores: torch.Tensor) -> torch.Tensor:
        current_place = self.places[-1]
        if (
            not current_place.block_opened
            or current_place.open_quotes
            or current_place.line.strip()
        ):
            return scores
        best_scores = scores.topk(min(LOOKED_AT, len(scores)))
        comment_tokens = [
            token
            for token, score in zip(
                best_scores.indices.tolist(), best_scores.values.tolist(), strict=True
            )
            if score > -math.inf and self.begins_comment(token)
        ]
        if not any("#" in self.texts[token] for token in comment_tokens):
            return scores
        changed_scores = scores.clone()
        changed_scores[comment_tokens] += self.boost
        return changed_scores

    def begins_comment(self, token: int) -> bool:
        """Whether a token begins a comment, or is spaces that one may follow."""
        if token not in self.texts:
            self.texts[token] = self.reader.decode([token])
        text = self.texts[token].lstrip(" \t")
        return text.startswith("#") or (not text and bool(self.texts[token]))


def read_line(place: Place, line: str) -> Place:
    """Returns the state after a full line."""
    if place.open_quotes:
        return replace(place, open_quotes="" if place.open_quotes in line else place.open_quotes)
    if not line.strip():
        return place
    quote_match = QUOTES.match(line) if place.block_opened else None
    if quote_match:
        is_closed = quote_match[1] in line[quote_match.end() :]
        return replace(place, open_quotes="" if is_closed else quote_match[1])
    return replace(place, block_opened=OPENS.fullmatch(line) is not None)
