"""Beams: the likeliest texts found so far, those that go on and those that have ended.

A group of beams advances by one token at a time, as in transformers: of all continuations of its
beams the best are looked at, at least twice as many as there are beams; those among the best
`width` that end are set aside, and the best `width` others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from foretell.ops.logits import best as largest


@dataclass(frozen=True)
class Beam:
    """A text behind the prompt: `score` is what it is ranked by, `logprob` its log-probability."""

    tokens: tuple[int, ...]
    score: float
    logprob: float


@dataclass(frozen=True)
class Ended:
    """A beam that has ended, with its score by length, and why."""

    beam: Beam
    score: float
    reason: str


@dataclass
class Group:
    """`width` beams. `penalty` is the power of the length by which scores are divided.

    `early`: True ends it as soon as `width` texts have ended, False as soon as the best living
    beam, as it stands, is behind all of them.
    """

    width: int
    penalty: float = 1.0
    early: bool = False
    alive: list[Beam] = field(default_factory=lambda: [Beam((), 0.0, 0.0)])
    ended: list[Ended] = field(default_factory=list)  # at most `width`, the best first
    chosen: list[int] = field(default_factory=list)  # tokens of the last step, those of ends too

    def advance(
        self,
        laws: Mapping[Beam, torch.Tensor],
        wide: int,
        reason_of: Callable[[tuple[int, ...]], str | None],
        taken: torch.Tensor | None = None,
    ) -> list[tuple[Beam, Beam]]:
        """One token more. Returns (parent, beam) of the living beams, the best first.

        `laws`: log-probabilities (V,) after each living beam; `wide`: continuations to look at;
        `reason_of`: why a text has ended; `taken` (V,): what a token costs in the score.
        """
        going: list[tuple[Beam, Beam]] = []
        self.chosen = []
        for rank, (parent, made) in enumerate(continuations(self.alive, laws, wide, taken)):
            reason = reason_of(made.tokens)
            if reason is None and len(going) < self.width:
                going.append((parent, made))
            elif reason is not None and rank < self.width:
                self.set_aside(made, reason)
            else:
                continue
            self.chosen.append(made.tokens[-1])
        self.alive = [made for _, made in going]
        return going

    def set_aside(self, beam: Beam, reason: str) -> None:
        """Takes in a text that has ended, if it is among the best."""
        score = beam.score / len(beam.tokens) ** self.penalty
        self.ended.append(Ended(beam, score, reason))
        self.ended.sort(key=lambda ended: -ended.score)  # stable: the older one stands first
        del self.ended[self.width :]

    @property
    def over(self) -> bool:
        """Whether no living beam is to go on."""
        if not self.alive:
            return True
        if len(self.ended) < self.width:
            return False
        best = self.alive[0].score / len(self.alive[0].tokens) ** self.penalty
        return self.early or best <= self.ended[-1].score


def continuations(
    alive: Sequence[Beam],
    laws: Mapping[Beam, torch.Tensor],
    wide: int,
    taken: torch.Tensor | None = None,
) -> list[tuple[Beam, Beam]]:
    """(parent, beam) of the `wide` best continuations that are possible, the best first."""
    rows = torch.stack([laws[beam] for beam in alive])
    scores = rows + rows.new_tensor([[beam.score] for beam in alive])
    if taken is not None:
        scores = scores - taken
    values, places = largest(scores.view(1, -1), wide)
    found = []
    for score, place in zip(values[0].tolist(), places[0].tolist(), strict=True):
        if score == -torch.inf:
            break
        parent, token = alive[place // rows.shape[1]], place % rows.shape[1]
        logprob = parent.logprob + float(laws[parent][token])
        found.append((parent, Beam((*parent.tokens, token), score, logprob)))
    return found
