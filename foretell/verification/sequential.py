"""Tries children in order: x drawn from q passes with min(1, p(x) / q(x)), else q leaves p.

Recursive rejection sampling: after a refusal p becomes (p - q)+, renormalised, and the next child
is tried; after the last one the token is drawn from what is left of p. Exact for chains,
deterministic trees, trees drawn with or without replacement and mixtures, because every node
carries the distribution its token was drawn from.

Paper: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318; Miao et al. (SpecInfer),
arXiv:2305.09781
Guarantee: exact
Cost: none
Needs: any tree
Trains: nothing
Differs: in nothing known
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.verification.acceptance import Rule, verify_in_order


@dataclass(frozen=True)
class Sequential(Rule):
    """Nothing to set."""

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        return verify_in_order(tree, target, rng, position)
