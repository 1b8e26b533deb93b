"""One draw a node decides among a deterministic tree's children and none of them.

The same law as the walk and as `sequential` on such trees, with one random number a node rather
than one a child.

Paper: the kernel of SGLang, sgl-kernel/csrc/speculative/speculative_sampling.cuh
Guarantee: exact
Cost: none
Needs: tokens chosen by a rule, not drawn
Trains: nothing
Differs:
- the kernel's thresholds, which make it lossy, are left out
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.core.rng import Door
from foretell.core.sampling import Target
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.core.verify import Rule


@dataclass(frozen=True)
class Coin(Rule):
    """Nothing to set."""

    needs = "tokens chosen by a rule, not drawn"

    def accepts(self, tree: TokenTree) -> bool:
        return not tree.drawn

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        node, outcome = 0, Outcome([], -1)
        while True:
            p, children = target.p(node), tree.tries[node]
            tokens = [tree.tokens[c] for c in children]
            rest = p.clone()
            rest[tokens] = 0
            laws = torch.cat(
                [p[tokens], rest.sum()[None]]
            )  # not 1 - the sum: rounding could then choose an empty rest
            choice = rng.sample(laws, "accept", position, tree.depths[node]) if children else 0
            outcome.tested += [(c, i == choice) for i, c in enumerate(children)]
            if choice == len(children):
                outcome.token = rng.sample(
                    rest / rest.sum(), "target", position + tree.depths[node]
                )
                return outcome
            node = children[choice]
            outcome.path.append(node)
