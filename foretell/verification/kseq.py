"""k independent drafts are each accepted with min(1, p / (r q)), r as small as is valid.

This is the k-sequential selection of SpecTr. Where `sequential` lowers p after each refusal, here
every try faces the same threshold, and the residual distribution makes up for all of them at once.
The drafts that begin with the accepted token go on together.

Paper: Sun, Suresh, Ro, Beirami, Jain, Yu, SpecTr: Fast Speculative Decoding via Optimal Transport,
arXiv:2310.15141
Guarantee: exact
Cost: O(V) a node, 60 bisection steps
Needs: children drawn independently from one distribution
Trains: nothing
Differs: in nothing known
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.verification.acceptance import TINY, Rule

BISECTIONS = 60


@dataclass(frozen=True)
class Kseq(Rule):
    """Nothing to set."""

    needs = "children drawn independently from one law"
    drawn = True

    def can_verify(self, tree: TokenTree) -> bool:
        for tries in tree.tries:
            laws = [tree.laws[child] for child in tries]
            if None in laws or len(set(map(id, laws))) > 1:
                return False
        return True

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        node = 0
        try_count = 0
        path: list[int] = []
        tested: list[tuple[int, bool]] = []
        while not target.ends(node):
            p = target.p(node)
            children = tree.tries[node]
            accepted_child = -1
            if children:
                draft_law = tree.laws[children[0]]
                assert draft_law is not None, "accepts() let a token through that was not drawn"
                q = draft_law.dense(len(p)).to(p)
                r = find_threshold(p, q, len(children))
                for child in children:
                    token = tree.tokens[child]
                    try_count += 1
                    pass_probability = float(p[token]) / (r * float(q[token]))
                    passed = rng.accept(pass_probability, "accept", position, try_count)
                    tested.append((child, passed))
                    if passed:
                        accepted_child = child
                        break
                else:
                    p = residual_probs(p, q, r, len(children))
            if accepted_child < 0:
                token = rng.sample(p, "target", position + tree.depths[node])
                return Outcome(path, token, tested)
            path.append(accepted_child)
            node = accepted_child
        return Outcome(path, None, tested)


def acceptance_mass(p: torch.Tensor, q: torch.Tensor, r: float) -> float:
    """The probability that one draw from q is accepted with min(1, p / (r q))."""
    return float(torch.minimum(q, p / r).sum())


def find_threshold(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """The smallest r in [1, k] that leaves no token accepted more often than p allows."""
    lower_bound, upper_bound = 1.0, float(k)
    for _ in range(BISECTIONS):
        r = (lower_bound + upper_bound) / 2
        beta = acceptance_mass(p, q, r)
        if 1 - (1 - beta) ** k > r * beta:
            lower_bound = r
        else:
            upper_bound = r
    return upper_bound


def residual_probs(p: torch.Tensor, q: torch.Tensor, r: float, k: int) -> torch.Tensor:
    """The distribution (V,) of the token after k refusals."""
    beta = acceptance_mass(p, q, r)
    if beta <= TINY:
        return p
    share = (1 - (1 - beta) ** k) / beta
    remaining = (p - torch.minimum(q, p / r) * share).clamp_min(0)
    remaining_mass = float(remaining.sum())
    return remaining / remaining_mass if remaining_mass > TINY else p
