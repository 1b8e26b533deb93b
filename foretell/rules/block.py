"""Accepts the longest block of a drawn chain whose joint ratio passes, rather than token by token.

The ratios of the tokens are multiplied along the chain, capped at 1; each prefix gets its own coin,
and the longest prefix whose coin falls right is accepted, so an unlucky token in the middle can be
made good by what follows it. Never accepts fewer tokens in expectation than `sequential`.

Paper: Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh, Block Verification Accelerates
Speculative Decoding, arXiv:2403.10444
Guarantee: exact
Cost: none beyond the rows of the chain
Needs: a chain of drawn tokens
Trains: nothing
Differs: in nothing known
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.core.rng import Door
from foretell.core.sampling import Target
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.core.verify import TINY, Rule


@dataclass(frozen=True)
class Block(Rule):
    """Nothing to set."""

    needs = "a chain of drawn tokens"

    def accepts(self, tree: TokenTree) -> bool:
        return tree.is_chain and all(tree.laws[1:])

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        size = len(tree) - 1
        laws = [target.p(i) for i in range(size + 1)]
        drafts = [q.dense(len(laws[0])).to(laws[0]) for q in tree.laws[1:] if q is not None]
        ratio, accepted = [1.0], 0
        for i in range(1, size + 1):
            token = tree.tokens[i]
            share = float(drafts[i - 1][token])
            ratio.append(
                min(1.0, ratio[-1] * float(laws[i - 1][token]) / share) if share > 0 else 0.0
            )
        for i in range(1, size + 1):
            chance = ratio[i]
            if i < size:
                over = float((ratio[i] * laws[i] - drafts[i]).clamp_min(0).sum())
                chance = over / (over + 1 - ratio[i]) if over + 1 - ratio[i] > TINY else 1.0
            if rng.accept(chance, "accept", position, i):
                accepted = i
        p = laws[accepted]
        if accepted < size:
            rest = (ratio[accepted] * p - drafts[accepted]).clamp_min(0)
            p = rest / rest.sum() if float(rest.sum()) > TINY else p
        tested = [(i, i <= accepted) for i in range(1, min(size, accepted + 1) + 1)]
        return Outcome(
            list(range(1, accepted + 1)), rng.sample(p, "target", position + accepted), tested
        )
