"""One draw a node decides among a deterministic tree's children and none of them.

The same law as the walk and as `sequential` on such trees, with one random number a node rather
than one a child. What that number means depends on the drafted children, so the same seed gives the
same tokens only with the same drafts: a drafter that learns from other requests while this one runs
changes its samples, never their law. (The default rule, `walk`, gives plain decoding's tokens
whatever was drafted.)

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

    def accepts(self, tree: TokenTree) -> bool:
        return not tree.drawn

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        node = 0
        path: list[int] = []
        tested: list[tuple[int, bool]] = []
        while not target.ends(node):
            p = target.p(node)
            children = tree.tries[node]
            tokens = [tree.tokens[child] for child in children]
            rest = p.clone()
            rest[tokens] = 0
            choice = 0
            if children:
                # The rest is summed rather than 1 minus the children: rounding could choose an
                # empty rest.
                law = torch.cat([p[tokens], rest.sum()[None]])
                choice = rng.sample(law, "accept", position, tree.depths[node])
            tested += [(child, rank == choice) for rank, child in enumerate(children)]
            if choice == len(children):
                rest /= rest.sum()
                token = rng.sample(rest, "target", position + tree.depths[node])
                return Outcome(path, token, tested)
            node = children[choice]
            path.append(node)
        return Outcome(path, None, tested)
