"""Accepts a draft that is among the target's best tokens and nearly as likely as the best one.

A token passes where it is one of the `beta` best of its place and its log-probability is at most
`tau` below that of the best. Of a node's children the likeliest that passes is followed. At the
first place where none passes the target decides: by its best token, or by a draw from its law. With
beta=1 and temperature 0 it is the greedy walk.

Paper: Xia, Ge, Wang, Chen, Wei, Sui, Speculative Decoding: Exploiting Speculative Execution for
Accelerating Seq2seq Generation, arXiv:2203.16487; Ge et al., Lossless Acceleration for Seq2seq
Generation with Aggressive Decoding, arXiv:2205.10350
Guarantee: lossy: drafts that the target would have put second, third, ... stay in the text
Cost: none
Needs: any tree
Trains: nothing
Differs:
- the paper decodes greedily; at another temperature rank and gap are those of the law that the
request samples from, and no token passes that its filters exclude
- trees are taken as well as chains
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.errors import BadConfig
from foretell.verification.acceptance import Rule


@dataclass(frozen=True)
class Relaxed(Rule):
    """A rank and a gap of log-probabilities, in nats."""

    beta: int = 5  # best tokens of a place of which a draft has to be one
    tau: float = 3.0  # how far below the best one it may be

    exact = False
    greedy = False

    def __post_init__(self) -> None:
        if not 1 <= self.beta <= 1024:
            raise BadConfig.field("beta", self.beta, "between 1 and 1024")
        if not 0 <= self.tau <= 100:
            raise BadConfig.field("tau", self.tau, "between 0 and 100")

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        node = 0
        outcome = Outcome([], None)
        while not target.ends(node):
            best, logs = _logs(target, node)
            children = list(dict.fromkeys(tree.tries[node]))
            passing = [child for child in children if self.passes(tree.tokens[child], best, logs)]
            taken = max(passing, key=lambda child: float(logs[tree.tokens[child]]), default=-1)
            outcome.tested += [(child, child == taken) for child in children]
            if taken < 0:
                outcome.token = best
                if not target.sampler.greedy:
                    place = position + tree.depths[node]
                    outcome.token = rng.sample(target.p(node), "target", place)
                break
            outcome.path.append(taken)
            node = taken
        return outcome

    def passes(self, token: int, best: int, logs: torch.Tensor) -> bool:
        """Whether a token may stay, by the logs (V,) of its place and the best token there."""
        if token == best:
            return True
        if not float(logs[token]) >= float(logs[best]) - self.tau:
            return False
        better = logs > logs[token]
        # Among equals the lowest id comes first, as everywhere.
        better[:token] |= logs[:token] == logs[token]
        return int(better.sum()) < self.beta


def _logs(target: Target, node: int) -> tuple[int, torch.Tensor]:
    """The best token after `node`, and log-probabilities (V,) up to a constant."""
    if target.sampler.greedy:
        best = target.best(node)
        return best, target.sampler.scores(target.rows[node], target.path(node))
    logs = target.p(node).log()
    return int(logs.argmax()), logs
