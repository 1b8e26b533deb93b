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

    def can_verify(self, tree: TokenTree) -> bool:
        return tree.is_chain and all(tree.laws[1:])

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        target_probs, draft_probs, ratios = joint_ratios(tree, target)
        chain_length = len(target_probs)  # nodes of the chain that can be accepted at all
        accepted_count = 0
        for node in range(1, chain_length + 1):
            pass_probability = ratios[node]
            if node < chain_length:
                surplus = float(
                    (ratios[node] * target_probs[node] - draft_probs[node]).clamp_min(0).sum()
                )
                total_mass = surplus + 1 - ratios[node]
                pass_probability = surplus / total_mass if total_mass > TINY else 1.0
            if rng.accept(pass_probability, "accept", position, node):
                accepted_count = node
        path = list(range(1, accepted_count + 1))
        tested = [
            (node, node <= accepted_count)
            for node in range(1, min(chain_length, accepted_count + 1) + 1)
        ]
        if target.ends(accepted_count):
            return Outcome(path, None, tested)
        if accepted_count < chain_length:
            p = target_probs[accepted_count]
            residual = (ratios[accepted_count] * p - draft_probs[accepted_count]).clamp_min(0)
            total_mass = float(residual.sum())
            p = residual / total_mass if total_mass > TINY else p
        else:
            p = target.p(accepted_count)
        return Outcome(path, rng.sample(p, "target", position + accepted_count), tested)


def joint_ratios(
    tree: TokenTree, target: Target
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Target's p and draft's q (V,) below nodes 0, 1, ... of a chain, and each path's joint ratio.

    The chain is followed as far as it can be accepted: to its end, to a token that ends the text,
    or to one that the target excludes. No distribution is asked for below that.
    """
    target_probs: list[torch.Tensor] = []
    draft_probs: list[torch.Tensor] = []
    ratios = [1.0]
    for node in range(1, len(tree)):
        token, draft_law = tree.tokens[node], tree.laws[node]
        assert draft_law is not None, "accepts() let a token through that was not drawn"
        p = target.p(node - 1)
        q = draft_law.dense(len(p)).to(p)
        target_probs.append(p)
        draft_probs.append(q)
        draft_probability = float(q[token])
        ratios.append(
            min(1.0, ratios[-1] * float(p[token]) / draft_probability)
            if draft_probability > 0
            else 0.0
        )
        if ratios[-1] == 0 or target.ends(node):
            break
    return target_probs, draft_probs, ratios
