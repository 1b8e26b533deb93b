"""Samples the target at every row and follows the child that equals the sample.

The token at a position is decided by one draw that is keyed by the position alone, so whatever was
drafted, the tokens are those that plain decoding gives with the same seed. Optimal for
deterministic trees.

Paper: folklore; compare Leviathan, Kalman, Matias, arXiv:2211.17192, appendix
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
from foretell.verification.acceptance import Rule, walk_tree


@dataclass(frozen=True)
class Walk(Rule):
    """Nothing to set."""

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        return walk_tree(tree, target, rng, position)
