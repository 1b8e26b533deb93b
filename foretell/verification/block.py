"""Accepts the longest block of a drawn chain whose joint ratio passes, not token by token.

The ratios p / q of the tokens are multiplied along the chain, capped at 1. Each prefix gets its own
coin, and the longest prefix whose coin falls right is accepted, so an unlucky token in the middle
can be made good by what follows it. Never accepts fewer tokens in expectation than `sequential`.

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

import torch

from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.verification.acceptance import TINY, Rule


@dataclass(frozen=True)
class Block(Rule):
    """Nothing to set."""

    needs = "a chain of drawn tokens"
    drawn = True

    def accepts(self, tree: TokenTree) -> bool:
        return tree.is_chain and all(tree.laws[1:])

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        laws, drafts, ratios = joint_ratios(tree, target)
        size = len(laws)  # nodes of the chain that can be accepted at all
        accepted = 0
        for node in range(1, size + 1):
            chance = ratios[node]
            if node < size:
                surplus = float((ratios[node] * laws[node] - drafts[node]).clamp_min(0).sum())
                total = surplus + 1 - ratios[node]
                chance = surplus / total if total > TINY else 1.0
            if rng.accept(chance, "accept", position, node):
                accepted = node
        path = list(range(1, accepted + 1))
        tested = [(node, node <= accepted) for node in range(1, min(size, accepted + 1) + 1)]
        if target.ends(accepted):
            return Outcome(path, None, tested)
        if accepted < size:
            p = laws[accepted]
            residual = (ratios[accepted] * p - drafts[accepted]).clamp_min(0)
            total = float(residual.sum())
            p = residual / total if total > TINY else p
        else:
            p = target.p(accepted)
        return Outcome(path, rng.sample(p, "target", position + accepted), tested)


def joint_ratios(
    tree: TokenTree, target: Target
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Of a chain: p and q (V,) below nodes 0, 1, ..., and the joint ratio of the path to each node.

    The chain is followed as far as it can be accepted: to its end, to a token that ends the text,
    or to one that the target excludes. No law is asked for below that.
    """
    laws: list[torch.Tensor] = []
    drafts: list[torch.Tensor] = []
    ratios = [1.0]
    for node in range(1, len(tree)):
        token, law = tree.tokens[node], tree.laws[node]
        assert law is not None, "accepts() let a token through that was not drawn"
        p = target.p(node - 1)
        q = law.dense(len(p)).to(p)
        laws.append(p)
        drafts.append(q)
        chance = float(q[token])
        ratios.append(min(1.0, ratios[-1] * float(p[token]) / chance) if chance > 0 else 0.0)
        if ratios[-1] == 0 or target.ends(node):
            break
    return laws, drafts, ratios
