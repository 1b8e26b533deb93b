"""A canvas: a text some of whose positions are masked, and what denoisers ask of it.

    position   0 ....... first-1 | first ..................... end-1
               the prompt        | tokens that are committed, and masks

A masked position has MASKED in place of a token. What its model reads there is the model's matter,
or what the denoiser shows it for the time being: tokens that change again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.core.model import Model

MASKED = -1
# Capabilities of a model that fills canvases: what it was taught to fill, masks or tokens drawn
# evenly. With each the method that `auto` stands for.
MASKS, NOISE = "masks", "noise"
FILLERS = {MASKS: "threshold", NOISE: "renoise"}


def filler(target: Model) -> str:
    """The method that `auto` stands for on a model that fills canvases."""
    return FILLERS[MASKS if MASKS in target.caps else NOISE]


@dataclass(slots=True)
class Look(Ask):
    """One forward over a canvas. Answered with the rows of the `wanted` positions, in their order:
    what the model says of the tokens there.

    The `computed` positions are computed anew, None: all; each attends to the `attended` ones,
    computed or not, None: to all. Others keep the cache rows that they were given last; those that
    have none are computed as well.
    """

    canvas: Sequence[int] = ()
    wanted: Sequence[int] = ()
    computed: Sequence[int] | None = None
    attended: Sequence[int] | None = None
    # (wanted, V): what the model said of these positions before, where it reads that; None: nothing
    said: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.canvas) if self.computed is None else len(self.computed)


def canvas_of(given: Any, vocab: int, mask_id: int | None) -> tuple[int, ...]:
    """What a user gives to stand behind a prompt: token ids, MASKED where to be filled. Raises
    BadConfig.
    """
    allowed = f"a list of token ids (0 to {vocab - 1}), with {MASKED} where to be filled"
    if hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, list | tuple):
        raise BadConfig.field("canvas", given, allowed)
    for token in given:
        if type(token) is not int or not MASKED <= token < vocab or token == mask_id:
            raise BadConfig(f"canvas: {token!r} cannot stand there; give {allowed}")
    if MASKED not in given:
        raise BadConfig(f"canvas: has nothing to fill; give {allowed}")
    return tuple(given)


def look(
    last: int,
    canvas: Sequence[int],
    wanted: Sequence[int],
    computed: Sequence[int] | None = None,
    attended: Sequence[int] | None = None,
    branch: int = 0,
    model: str = "target",
    said: torch.Tensor | None = None,
) -> Look:
    """A Look on a branch whose text ends with the token `last`."""
    view = (list(canvas), list(wanted), computed, attended, said)
    return Look(TokenTree(last), model, branch, None, (), None, False, 0, None, None, *view)


OWN = -1  # in place of a block's size: the model's own
USUAL = 32  # the size where it has none, as in the published samplers


@dataclass
class Sheet:
    """A canvas while it is filled.

    `known`: of each position behind the prompt that was committed, in what round and with what
    chance of its token (the model's own, before temperature and filters). `logprobs`: of each the
    entry that stats.logprobs made of the row it was committed by, where these are asked for.
    `shown`: of masked positions the tokens that the model reads there for the time being.
    `own_block`: positions of a block of the model's, where it sees whole blocks and those before
    them; else 0. Blocks are then counted from the text's beginning, not from the prompt's end.
    """

    canvas: list[int]
    first: int
    given: frozenset[int] = frozenset()  # positions behind the prompt whose token was given
    rounds: int = 0
    commits: int = 0  # tokens that were committed, those that were taken back included
    known: dict[int, tuple[int, float]] = field(default_factory=dict)
    logprobs: dict[int, tuple[float, list[tuple[int, float]]]] = field(default_factory=dict)
    told: list[int] | None = None  # what stood behind the prompt when `changes` was called last
    shown: dict[int, int] = field(default_factory=dict)
    own_block: int = 0

    @property
    def end(self) -> int:
        return len(self.canvas)

    @property
    def masked(self) -> list[int]:
        """Masked positions, ascending."""
        return [place for place in range(self.first, self.end) if self.canvas[place] == MASKED]

    def read(self, end: int) -> list[int]:
        """What the model reads of it before `end`."""
        shown = self.shown
        return [shown.get(place, token) for place, token in enumerate(self.canvas[:end])]

    def block(self, size: int) -> tuple[int, int]:
        """The block, from where to where, of the first masked position; see `size_of`."""
        size, masked = self.size_of(size), self.masked
        if not size or not masked:
            return self.first, self.end
        origin = 0 if self.own_block else self.first
        start = origin + self.block_number(masked[0], size) * size
        return max(start, self.first), min(start + size, self.end)

    def block_number(self, place: int, size: int) -> int:
        """Of the block of this many positions that `place` is in."""
        return (place if self.own_block else place - self.first) // size

    def size_of(self, size: int) -> int:
        """Positions of a block; 0: the canvas is one. A `size` of OWN is the model's, or USUAL."""
        return size if size != OWN else self.own_block or USUAL

    def commit(self, place: int, token: int, chance: float) -> None:
        assert self.canvas[place] == MASKED, "a committed token is not changed"
        self.canvas[place] = token
        self.shown.pop(place, None)
        self.known[place] = self.rounds, chance
        self.commits += 1

    def mask(self, place: int) -> None:
        """Takes a committed token back."""
        del self.known[place]
        self.logprobs.pop(place, None)
        self.canvas[place] = MASKED

    def copy(self) -> Sheet:
        known, logprobs = dict(self.known), dict(self.logprobs)
        canvas, shown = list(self.canvas), dict(self.shown)
        return replace(self, canvas=canvas, known=known, logprobs=logprobs, shown=shown)

    def changes(self) -> list[tuple[int, int | None]] | None:
        """What is otherwise than at the last call, as of types.Tell; None: nothing, not even the
        length. The first call tells of a canvas of masks, and what was given in it.
        """
        now = self.canvas[self.first :]
        before, self.told = self.told, now
        if before == now:
            return None
        old = before or [MASKED] * len(now)
        changed = [i for i, token in enumerate(now) if token != old[i]]
        return [(i, None if now[i] == MASKED else now[i]) for i in changed]
