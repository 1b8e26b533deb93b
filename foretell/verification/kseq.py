"""k independent drafts are each accepted with min(1, p / (r q)), r as small as is valid.

This is the k-sequential selection of SpecTr. Where `sequential` lowers p after each refusal, here
every try faces the same threshold, and the residual law makes up for all of them at once. The
drafts that begin with the accepted token go on together.

Paper: Sun, Suresh, Ro, Beirami, Jain, Yu, SpecTr: Fast Speculative Decoding via Optimal Transport,
arXiv:2310.15141
Guarantee: exact
Cost: O(V) a node, 60 bisection steps
Needs: children drawn independently from one law
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

    def accepts(self, tree: TokenTree) -> bool:
        for tries in tree.tries:
            laws = [tree.laws[child] for child in tries]
            if None in laws or len(set(map(id, laws))) > 1:
                return False
        return True

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        node = 0
        tries = 0
        path: list[int] = []
        tested: list[tuple[int, bool]] = []
        while not target.ends(node):
            p = target.p(node)
            children = tree.tries[node]
            accepted = -1
            if children:
                law = tree.laws[children[0]]
                assert law is not None, "accepts() let a token through that was not drawn"
                q = law.dense(len(p)).to(p)
                r = threshold(p, q, len(children))
                for child in children:
                    token = tree.tokens[child]
                    tries += 1
                    chance = float(p[token]) / (r * float(q[token]))
                    taken = rng.accept(chance, "accept", position, tries)
                    tested.append((child, taken))
                    if taken:
                        accepted = child
                        break
                else:
                    p = residual(p, q, r, len(children))
            if accepted < 0:
                token = rng.sample(p, "target", position + tree.depths[node])
                return Outcome(path, token, tested)
            path.append(accepted)
            node = accepted
        return Outcome(path, None, tested)


def overlap(p: torch.Tensor, q: torch.Tensor, r: float) -> float:
    """The chance that one draw from q is accepted with min(1, p / (r q))."""
    return float(torch.minimum(q, p / r).sum())


def threshold(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """The smallest r in [1, k] that leaves no token accepted more often than p allows."""
    low, high = 1.0, float(k)
    for _ in range(BISECTIONS):
        r = (low + high) / 2
        beta = overlap(p, q, r)
        if 1 - (1 - beta) ** k > r * beta:
            low = r
        else:
            high = r
    return high


def residual(p: torch.Tensor, q: torch.Tensor, r: float, k: int) -> torch.Tensor:
    """The law (V,) of the token after k refusals."""
    beta = overlap(p, q, r)
    if beta <= TINY:
        return p
    share = (1 - (1 - beta) ** k) / beta
    rest = (p - torch.minimum(q, p / r) * share).clamp_min(0)
    total = float(rest.sum())
    return rest / total if total > TINY else p
