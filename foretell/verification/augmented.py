"""Accepts what a drafter with other knowledge draws, where the target would have to learn it.

A drafter that reads other text than the target, such as `rapid`, may know better. So the target's
distribution p is moved towards the drafter's distribution q by one step of distillation: of the
token's logit is taken `eta` (p - q), where q is at least `alpha` of its largest value. A drafted
token is accepted by the moved distribution; where it is refused, the next token is drawn from what
p has more than q or than the moved distribution. After a draft that was accepted whole the token is
the target's own. With eta=0 it is exact, and gives the tokens of `sequential`.

Paper: Chen et al., RAPID: Long-Context Inference with Retrieval-Augmented Speculative Decoding,
arXiv:2502.20330
Guarantee: lossy: the text's distribution lies between the target's and the drafter's; with eta=0
nothing
Cost: none
Needs: a chain of tokens that were drawn
Trains: nothing
Differs:
- at temperature 0 it is the greedy walk: the moved distribution of a greedy target is the target's
own
- where both distributions agree there is nothing to draw from after a refusal, which rounding alone
can cause: the draft is accepted then, and the released code divides by zero
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
from foretell.verification.acceptance import TINY, Rule


@dataclass(frozen=True)
class Augmented(Rule):
    """The authors take eta=10 where a model drafts for itself, 20 and more for a larger drafter."""

    # how far the target's distribution is moved; 0: not at all
    eta: Annotated[float, Range(0, 1000)] = 10.0
    # share of the drafter's best probability below which a token stays as it is
    alpha: Annotated[float, Range(0, 1)] = 0.1

    needs = "a chain of tokens that were drawn"
    drawn = True
    exact = False

    def can_verify(self, tree: TokenTree) -> bool:
        return tree.is_chain and None not in tree.laws[1:]

    def moved_distribution(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """The distribution (V,) between the target's p and the drafter's q."""
        if not self.eta:
            return p
        step = self.eta * (p - q)
        likely = q >= self.alpha * q.max()
        return (p.log() - step.where(likely, 0.0)).softmax(-1)

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        outcome = Outcome([], None)
        for child in range(1, len(tree)):
            node = child - 1
            if target.ends(node):
                return outcome
            token = tree.tokens[child]
            draft_law = tree.laws[child]
            assert draft_law is not None, "not a chain of drawn tokens"
            p = target.p(node)
            q = draft_law.dense(len(p)).to(p)
            moved_probs = self.moved_distribution(p, q)
            draft_probability = float(q[token])
            ratio = float(moved_probs[token]) / draft_probability if draft_probability > 0 else 0.0
            passed = rng.accept(ratio, "accept", position, child)
            if not passed:
                residual = torch.maximum(p - q, p - moved_probs).clamp_min_(0)
                residual_mass = float(residual.sum())
                passed = residual_mass <= TINY
            outcome.tested.append((child, passed))
            if not passed:
                outcome.token = rng.sample(residual / residual_mass, "target", position + node)
                return outcome
            outcome.path.append(child)
        last_node = len(tree) - 1
        if not target.ends(last_node):
            outcome.token = rng.sample(target.p(last_node), "target", position + last_node)
        return outcome
