"""Accepts drafts by a coin of a chosen bias: for timing an acceptance that no model has.

The first child of a node is accepted with probability `rate`, each further one with `fall` times
the probability of the one before it, whatever the target says; the token after the path is the
target's. So schedules, sizes and machines can be measured at any acceptance:
`draft:length=6,rule=synthetic,rate=0.9`. The text is worthless.

Paper: none, it is a measuring device
Guarantee: lossy: the text is made of whatever was drafted, at temperature 0 too; only its speed
means something
Cost: none
Needs: any tree
Trains: nothing
Differs: there is no paper
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.errors import BadConfig
from foretell.verification.acceptance import Rule


@dataclass(frozen=True)
class Synthetic(Rule):
    """Both are probabilities."""

    # that the first child of an accepted node is accepted
    rate: Annotated[float, Range(0, 1)] = 0.7
    fall: Annotated[float, Range(0, 1)] = 0.5  # what is left of it for each further child

    exact = greedy = False

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        if target.sampler.guide is not None:
            raise BadConfig(
                "rule 'synthetic' accepts by chance, so it cannot honour "
                "json_schema, regex, grammar or constraint: choose another rule"
            )
        node = 0
        try_count = 0
        path: list[int] = []
        tested: list[tuple[int, bool]] = []
        while not target.ends(node):
            accepted_child = -1
            pass_probability = self.rate
            for child in dict.fromkeys(tree.tries[node]):  # a child drawn twice is tried once
                try_count += 1
                passed = rng.accept(pass_probability, "accept", position, try_count)
                tested.append((child, passed))
                if passed:
                    accepted_child = child
                    break
                pass_probability *= self.fall
            if accepted_child < 0:
                if target.sampler.greedy:
                    token = target.best_token(node)
                else:
                    token = rng.sample(target.p(node), "target", position + tree.depths[node])
                return Outcome(path, token, tested)
            path.append(accepted_child)
            node = accepted_child
        return Outcome(path, None, tested)
