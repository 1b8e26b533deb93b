"""One draw a node decides among a deterministic tree's children and none of them.

The same distribution as the walk and as `sequential` on such trees, with one random number a node
rather than one a child. What that number means depends on the drafted children, so the same seed
gives the same tokens only with the same drafts: a drafter that learns from other requests while
this one runs changes its samples, never their distribution. (The default rule, `walk`, gives plain
decoding's tokens whatever was drafted.)

Paper: the kernel of SGLang, sgl-kernel/csrc/speculative/speculative_sampling.cuh
Guarantee: exact
Cost: none
Needs: tokens chosen by a rule, not drawn
Trains: nothing
Differs:
- the kernel's acceptance thresholds, which make it lossy, are left out
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.verification.acceptance import Rule


@dataclass(frozen=True)
class Coin(Rule):
    """Nothing to set."""

    needs = "tokens chosen by a rule, not drawn"

    def can_verify(self, tree: TokenTree) -> bool:
        return not tree.has_draws

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        node = 0
        path: list[int] = []
        tested: list[tuple[int, bool]] = []
        while not target.ends(node):
            p = target.p(node)
            children = tree.tries[node]
            tokens = [tree.tokens[child] for child in children]
            residual = p.clone()
            residual[tokens] = 0
            choice_index = 0
            if children:
                # The rest is summed rather than 1 minus the children: rounding could choose an
                # empty rest.
                choice_probs = torch.cat([p[tokens], residual.sum()[None]])
                choice_index = rng.sample(choice_probs, "accept", position, tree.depths[node])
            tested += [(child, rank == choice_index) for rank, child in enumerate(children)]
            if choice_index == len(children):
                residual /= residual.sum()
                token = rng.sample(residual, "target", position + tree.depths[node])
                return Outcome(path, token, tested)
            node = children[choice_index]
            path.append(node)
        return Outcome(path, None, tested)
