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


def default_filler(target: Model) -> str:
    """The method that `auto` stands for on a model that fills canvases."""
    return FILLERS[MASKS if MASKS in target.caps else NOISE]


@dataclass(slots=True)
class Look(Ask):
    """A forward over a canvas. Answered with the rows of the `wanted` positions, in their order:
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


def canvas_of(user_canvas: Any, vocab: int, mask_id: int | None) -> tuple[int, ...]:
    """Checks a user's canvas after a prompt: token ids, MASKED where to be filled. Raises
    BadConfig.
    """
    expected = f"a list of token ids (0 to {vocab - 1}), with {MASKED} where to be filled"
    if hasattr(user_canvas, "tolist"):
        user_canvas = user_canvas.tolist()
    if not isinstance(user_canvas, list | tuple):
        raise BadConfig.field("canvas", user_canvas, expected)
    for token in user_canvas:
        if type(token) is not int or not MASKED <= token < vocab or token == mask_id:
            raise BadConfig(f"canvas: {token!r} cannot stand there; give {expected}")
    if MASKED not in user_canvas:
        raise BadConfig(f"canvas: has nothing to fill; give {expected}")
    return tuple(user_canvas)


def make_look(
    last_token: int,
    canvas: Sequence[int],
    requested_positions: Sequence[int],
    computed_positions: Sequence[int] | None = None,
    attended_positions: Sequence[int] | None = None,
    branch: int = 0,
    model: str = "target",
    previous_rows: torch.Tensor | None = None,
) -> Look:
    """A Look on a branch whose text ends with the token `last_token`."""
    view = (
        list(canvas),
        list(requested_positions),
        computed_positions,
        attended_positions,
        previous_rows,
    )
    return Look(TokenTree(last_token), model, branch, None, (), None, False, 0, None, None, *view)


OWN = -1  # in place of a block's size: the model's own
USUAL = 32  # the size where it has none, as in the published samplers


@dataclass
class Sheet:
    """A canvas while it is filled.

    `known`: of each position after the prompt that was committed, in what round and with what
    probability of its token (the model's own, before temperature and filters). `logprobs`: of each
    the entry that stats.row_logprobs made of the row it was committed by, where these are asked
    for.
    `shown`: of masked positions the tokens that the model reads there for the time being.
    `own_block`: positions of a block of the model's, where it sees whole blocks and those before
    them; else 0. Blocks are then counted from the text's beginning, not from the prompt's end.
    """

    canvas: list[int]
    first: int
    given: frozenset[int] = frozenset()  # positions after the prompt whose token was given
    rounds: int = 0
    commits: int = 0  # tokens that were committed, those that were taken back included
    known: dict[int, tuple[int, float]] = field(default_factory=dict)
    logprobs: dict[int, tuple[float, list[tuple[int, float]]]] = field(default_factory=dict)
    reported_tokens: list[int] | None = (
        None  # what stood after the prompt when `take_changes` was called last
    )
    shown: dict[int, int] = field(default_factory=dict)
    own_block: int = 0

    @property
    def end(self) -> int:
        return len(self.canvas)

    @property
    def masked(self) -> list[int]:
        """Masked positions, ascending."""
        return [
            position for position in range(self.first, self.end) if self.canvas[position] == MASKED
        ]

    def visible_tokens(self, end: int) -> list[int]:
        """Tokens before position `end` as the model reads them."""
        shown_tokens = self.shown
        return [
            shown_tokens.get(position, token) for position, token in enumerate(self.canvas[:end])
        ]

    def block(self, size: int) -> tuple[int, int]:
        """The block, from where to where, of the first masked position; see `size_of`."""
        size, masked = self.size_of(size), self.masked
        if not size or not masked:
            return self.first, self.end
        origin = 0 if self.own_block else self.first
        start = origin + self.block_number(masked[0], size) * size
        return max(start, self.first), min(start + size, self.end)

    def block_number(self, position: int, size: int) -> int:
        """Number of the block, `size` positions long, that holds `position`."""
        return (position if self.own_block else position - self.first) // size

    def size_of(self, size: int) -> int:
        """Positions of a block; 0: the canvas is one. A `size` of OWN is the model's, or USUAL."""
        return size if size != OWN else self.own_block or USUAL

    def commit(self, position: int, token: int, probability: float) -> None:
        assert self.canvas[position] == MASKED, "a committed token is not changed"
        self.canvas[position] = token
        self.shown.pop(position, None)
        self.known[position] = self.rounds, probability
        self.commits += 1

    def mask(self, position: int) -> None:
        """Takes a committed token back."""
        del self.known[position]
        self.logprobs.pop(position, None)
        self.canvas[position] = MASKED

    def copy(self) -> Sheet:
        known_tokens, logprobs = dict(self.known), dict(self.logprobs)
        canvas, shown_tokens = list(self.canvas), dict(self.shown)
        return replace(
            self, canvas=canvas, known=known_tokens, logprobs=logprobs, shown=shown_tokens
        )

    def take_changes(self) -> list[tuple[int, int | None]] | None:
        """Changes since the last call, as of types.Tell; None: nothing changed, not even the
        length. The first call tells of a canvas of masks, and what was given in it.
        """
        current_tokens = self.canvas[self.first :]
        previous_tokens, self.reported_tokens = self.reported_tokens, current_tokens
        if previous_tokens == current_tokens:
            return None
        compared_tokens = previous_tokens or [MASKED] * len(current_tokens)
        changed_positions = [
            i for i, token in enumerate(current_tokens) if token != compared_tokens[i]
        ]
        return [
            (i, None if current_tokens[i] == MASKED else current_tokens[i])
            for i in changed_positions
        ]
