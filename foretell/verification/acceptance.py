"""Verification: (tree, target distributions, randomness) -> which drafted path is accepted, what
follows it.

Here are the two rules everything rests on and the base of all. `walk_tree` follows the target's own
samples: exact on any tree, optimal for deterministic ones, seed by seed the plain decoder's tokens.
`verify_in_order` is recursive rejection over a node's tries: exact for any mixture of
distributions, and it accepts more of drawn tokens. Other files here are rules; each says which
trees it accepts and refuses the rest: a tree verified with the wrong distribution is silently
biased. Where an accepted node ends the text, nothing is asked after it: plain decoding would not
have asked, and a grammar may have no answer there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretell.core.distribution import Target
from foretell.core.draws import draw_ahead
from foretell.core.random import Door
from foretell.core.settings import Settings
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.errors import BadConfig

TINY = 1e-12


class Rule(Settings):
    """The base of a rule, which is a frozen dataclass with `verify_tree`; its arguments are
    walk_tree's.
    """

    needs = "any tree"  # in words, for the error
    drawn = False  # whether it verifies drawn tokens alone
    exact = True  # whether its distribution is the target's
    greedy = True  # whether at temperature 0 it is the walk
    taps: tuple[int, ...] = ()  # hidden states that it reads in Target.reply, as of a Drafter

    def begin(self, ctx: Any) -> Callable[[TokenTree, Target, Door, int], Outcome]:
        """The function that verifies in this request. Raises where a target lacks what it reads."""
        return self

    def can_verify(self, tree: TokenTree) -> bool:
        """Whether it can verify a tree of this shape, with these distributions."""
        return True

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        raise NotImplementedError

    def __call__(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        """Verifies; with a greedy target nearly every rule is the walk.

        Raises BadConfig for a tree it refuses.
        """
        if target.sampler.greedy and self.greedy:
            return walk_tree(tree, target, rng, position)
        if not self.can_verify(tree):
            name = type(self).__name__.lower()
            raise BadConfig(f"rule {name!r} cannot verify these trees: it needs {self.needs}")
        return self.verify_tree(tree, target, rng, position)


def verify_by_default(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """`walk_tree` for deterministic trees, `verify_in_order` for drawn ones."""
    rule = verify_in_order if tree.has_draws and not target.sampler.greedy else walk_tree
    return rule(tree, target, rng, position)


def walk_tree(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """Samples the target at every row and follows the child that equals the sample.

    `position`: tokens generated so far, so that a node of depth d decides position + d.
    """
    node = 0
    outcome = Outcome([], None)
    known_tokens = draw_ahead(target, rng, position, tree.depths)
    while not target.ends(node):
        if known_tokens is not None:
            token = known_tokens[node]
            if token < 0:
                raise target.fault(node)
        elif target.sampler.greedy:
            token = target.best_token(node)
        else:
            token = rng.sample(target.p(node), "target", position + tree.depths[node])
        child = tree.find_child(node, token)
        outcome.tested += [
            (sibling, sibling == child) for sibling in dict.fromkeys(tree.tries[node])
        ]
        if child < 0:
            outcome.token = token
            break
        outcome.path.append(child)
        node = child
    return outcome


def verify_in_order(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """At each node tries the children in order.

    x drawn from q is accepted with probability min(1, p(x)/q(x)), else p <- (p - q)+, renormalised.
    """
    node = 0
    draw_count = 0
    outcome = Outcome([], None)
    while not target.ends(node):
        p = target.p(node)
        accepted_child = -1
        for child in tree.tries[node]:
            token = tree.tokens[child]
            q = tree.laws[child]
            draft_probability = 1.0 if q is None else q.token_prob(token)
            draw_count += 1
            ratio = float(p[token]) / draft_probability if draft_probability > 0 else 0.0
            passed = rng.accept(ratio, "accept", position, draw_count)
            if not passed:
                residual = p.clone()
                if q is None:
                    residual[token] = 0
                else:
                    residual = (p - q.dense(len(p)).to(p)).clamp_min_(0)
                residual_mass = float(residual.sum())
                # Nothing left means that p was q up to rounding: the refusal was a rounding event.
                passed = residual_mass <= TINY
                p = p if passed else residual / residual_mass
            outcome.tested.append((child, passed))
            if passed:
                accepted_child = child
                break
        if accepted_child < 0:
            outcome.token = rng.sample(p, "target", position + tree.depths[node])
            break
        outcome.path.append(accepted_child)
        node = accepted_child
    return outcome
