"""Accepts a draft that is likely enough given how uncertain the target is at its place.

A token x passes where p(x) > min(epsilon, delta exp(-H(p))), H being the entropy. Of all paths of
passing tokens the longest wins, the likelier among equals; the token after it is drawn from the
target. At temperature 0 it is the greedy walk.

Paper: Cai, Li, Geng, Peng, Lee, Chen, Dao, Medusa, arXiv:2401.10774, section 3.3.1
Guarantee: lossy: tokens the target would seldom draw are accepted, so texts are likelier than the
target's own
Cost: none
Needs: any tree
Trains: nothing
Differs:
- the token after the path is drawn from the full distribution, where the reference takes the argmax
in its fast mode
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.verification.acceptance import Rule


@dataclass(frozen=True)
class Typical(Rule):
    """Both thresholds are probabilities in (0, 1]; the authors advise delta = sqrt(epsilon)."""

    epsilon: Annotated[float, Range(0, 1, open_low=True)] = 0.09
    delta: Annotated[float, Range(0, 1, open_low=True)] = 0.3

    exact = False

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        target_probs: dict[int, torch.Tensor] = {}
        path_scores: dict[int, float] = {0: 0.0}  # of a node whose path passes: log-probability
        tested: list[tuple[int, bool]] = []
        for node, children in enumerate(tree.tries):
            if node not in path_scores or not children or target.ends(node):
                continue
            p = target_probs[node] = target.p(node)
            entropy = float(-(p * (p + 1e-5).log()).sum())
            threshold = min(self.epsilon, self.delta * math.exp(-entropy))
            for child in dict.fromkeys(children):  # a child drawn twice is tried once
                probability = float(p[tree.tokens[child]])
                tested.append((child, probability > threshold))
                if probability > threshold:
                    path_scores[child] = path_scores[node] + math.log(probability)
        best_node = max(path_scores, key=lambda node: (tree.depths[node], path_scores[node], -node))
        path = tree.path(best_node)
        if target.ends(best_node):
            return Outcome(path, None, tested)
        p = target_probs[best_node] if best_node in target_probs else target.p(best_node)
        return Outcome(path, rng.sample(p, "target", position + len(path)), tested)
