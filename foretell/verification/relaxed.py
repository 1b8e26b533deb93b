"""Accepts a draft that is among the target's best tokens and nearly as likely as the best one.

A token passes where it is one of the `beta` best of its place and its log-probability is at most
`tau` below that of the best. Of a node's children the likeliest that passes is followed. At the
first place where none passes the target decides: by its best token, or by a draw from its
distribution. With beta=1 and temperature 0 it is the greedy walk.

Paper: Xia, Ge, Wang, Chen, Wei, Sui, Speculative Decoding: Exploiting Speculative Execution for
Accelerating Seq2seq Generation, arXiv:2203.16487; Ge et al., Lossless Acceleration for Seq2seq
Generation with Aggressive Decoding, arXiv:2205.10350
Guarantee: lossy: drafts that the target would have put second, third, ... stay in the text
Cost: none
Needs: any tree
Trains: nothing
Differs:
- the paper decodes greedily; at another temperature rank and gap are those of the distribution that
the request samples from, and no token passes that its filters exclude
- trees are taken as well as chains
"""

from __future__ import annotations

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
class Relaxed(Rule):
    """A rank and a gap of log-probabilities, in nats."""

    # best tokens of a place of which a draft has to be one
    beta: Annotated[int, Range(1, 1024)] = 5
    tau: Annotated[float, Range(0, 100)] = 3.0  # how far below the best one it may be

    exact = False
    greedy = False

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        node = 0
        outcome = Outcome([], None)
        while not target.ends(node):
            best_token, log_probs = _best_and_log_probs(target, node)
            children = list(dict.fromkeys(tree.tries[node]))
            passing_children = [
                child
                for child in children
                if self.passes_token(tree.tokens[child], best_token, log_probs)
            ]
            followed_child = max(
                passing_children, key=lambda child: float(log_probs[tree.tokens[child]]), default=-1
            )
            outcome.tested += [(child, child == followed_child) for child in children]
            if followed_child < 0:
                outcome.token = best_token
                if not target.sampler.greedy:
                    token_position = position + tree.depths[node]
                    outcome.token = rng.sample(target.p(node), "target", token_position)
                break
            outcome.path.append(followed_child)
            node = followed_child
        return outcome

    def passes_token(self, token: int, best_token: int, log_probs: torch.Tensor) -> bool:
        """Whether a token may stay, by the logs (V,) of its place and the best token there."""
        if token == best_token:
            return True
        if not float(log_probs[token]) >= float(log_probs[best_token]) - self.tau:
            return False
        is_better = log_probs > log_probs[token]
        # Among equals the lowest id comes first, as everywhere.
        is_better[:token] |= log_probs[:token] == log_probs[token]
        return int(is_better.sum()) < self.beta


def _best_and_log_probs(target: Target, node: int) -> tuple[int, torch.Tensor]:
    """The best token after `node`, and log-probabilities (V,) up to a constant."""
    if target.sampler.greedy:
        best_token = target.best_token(node)
        return best_token, target.sampler.scores(target.rows[node], target.path(node))
    log_probs = target.p(node).log()
    return int(log_probs.argmax()), log_probs
