"""Beams: the likeliest texts found so far, those that go on and those that have ended.

A group of beams advances by one token at a time, as in transformers: of all continuations of its
beams the best are looked at, at least twice as many as there are beams; those among the best
`width` that end are set aside, and the best `width` others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from foretell.ops.logits import best_logits as largest


@dataclass(frozen=True)
class Beam:
    """A text after the prompt: `score` is what it is ranked by, `logprob` its log-probability."""

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
    beam, as it stands, is worse than all of them.
    """

    width: int
    penalty: float = 1.0
    early: bool = False
    living_beams: list[Beam] = field(default_factory=lambda: [Beam((), 0.0, 0.0)])
    ended_beams: list[Ended] = field(default_factory=list)  # at most `width`, the best first
    chosen_tokens: list[int] = field(
        default_factory=list
    )  # tokens of the last step, those of ends too

    def advance(
        self,
        log_probs: Mapping[Beam, torch.Tensor],
        candidate_count: int,
        reason_of: Callable[[tuple[int, ...]], str | None],
        token_costs: torch.Tensor | None = None,
    ) -> list[tuple[Beam, Beam]]:
        """Advances every beam by a token. Returns (parent, beam) of the living beams, the best
        first.

        `log_probs`: log-probabilities (V,) after each living beam; `candidate_count`: continuations
        to look at; `reason_of`: why a text has ended; `token_costs` (V,): what a token costs in the
        score.
        """
        continuing_pairs: list[tuple[Beam, Beam]] = []
        self.chosen_tokens = []
        for rank, (parent, new_beam) in enumerate(
            best_continuations(self.living_beams, log_probs, candidate_count, token_costs)
        ):
            end_reason = reason_of(new_beam.tokens)
            if end_reason is None and len(continuing_pairs) < self.width:
                continuing_pairs.append((parent, new_beam))
            elif end_reason is not None and rank < self.width:
                self.keep_ended(new_beam, end_reason)
            else:
                continue
            self.chosen_tokens.append(new_beam.tokens[-1])
        self.living_beams = [new_beam for _, new_beam in continuing_pairs]
        return continuing_pairs

    def keep_ended(self, beam: Beam, reason: str) -> None:
        """Takes in a text that has ended, if it is among the best."""
        length_score = beam.score / len(beam.tokens) ** self.penalty
        self.ended_beams.append(Ended(beam, length_score, reason))
        self.ended_beams.sort(
            key=lambda ended_beam: -ended_beam.score
        )  # stable: the older one stands first
        del self.ended_beams[self.width :]

    @property
    def is_over(self) -> bool:
        """Whether no living beam is to go on."""
        if not self.living_beams:
            return True
        if len(self.ended_beams) < self.width:
            return False
        best_score = self.living_beams[0].score / len(self.living_beams[0].tokens) ** self.penalty
        return self.early or best_score <= self.ended_beams[-1].score


def best_continuations(
    living_beams: Sequence[Beam],
    log_probs: Mapping[Beam, torch.Tensor],
    candidate_count: int,
    token_costs: torch.Tensor | None = None,
) -> list[tuple[Beam, Beam]]:
    """(parent, beam) of the `candidate_count` best continuations that are possible, the
    best first.
    """
    stacked_rows = torch.stack([log_probs[beam] for beam in living_beams])
    scores = stacked_rows + stacked_rows.new_tensor([[beam.score] for beam in living_beams])
    if token_costs is not None:
        scores = scores - token_costs
    best_scores, flat_indices = largest(scores.view(1, -1), candidate_count)
    beam_pairs = []
    for score, flat_index in zip(best_scores[0].tolist(), flat_indices[0].tolist(), strict=True):
        if score == -torch.inf:
            break
        parent, token = (
            living_beams[flat_index // stacked_rows.shape[1]],
            flat_index % stacked_rows.shape[1],
        )
        logprob = parent.logprob + float(log_probs[parent][token])
        beam_pairs.append((parent, Beam((*parent.tokens, token), score, logprob)))
    return beam_pairs
