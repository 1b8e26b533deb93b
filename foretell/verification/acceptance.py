"""Verification: (tree, target laws, randomness) -> which drafted path is accepted, what follows it.

Here are the two rules everything rests on and the base of all. `walk` follows the target's own
samples: exact on any tree, optimal for deterministic ones, seed by seed the plain decoder's tokens.
`sequential` is recursive rejection over a node's tries: exact for any mixture of laws, and it
accepts more of drawn tokens. More rules stand in `rules/`; each says which trees it accepts and
refuses the rest: a tree verified with the wrong law is silently biased. Where an accepted node ends
the text, nothing is asked behind it: plain decoding would not have asked, and a grammar may have no
answer there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretell.core.distribution import Target
from foretell.core.draws import ahead
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.errors import BadConfig

TINY = 1e-12


class Rule:
    """The base of a rule, which is a frozen dataclass with `verify`; its arguments are walk's."""

    needs = "any tree"  # in words, for the error
    drawn = False  # whether it verifies drawn tokens alone
    exact = True  # whether its law is the target's
    greedy = True  # whether at temperature 0 it is the walk
    taps: tuple[int, ...] = ()  # hidden states that it reads in Target.reply, as of a Drafter

    def begin(self, ctx: Any) -> Callable[[TokenTree, Target, Door, int], Outcome]:
        """What verifies in this request. Raises for a target that lacks what it reads."""
        return self

    def accepts(self, tree: TokenTree) -> bool:
        """Whether it can verify a tree of this shape, with these laws."""
        return True

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        raise NotImplementedError

    def __call__(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        """Verifies; with a greedy target nearly every rule is the walk.

        Raises BadConfig for a tree it refuses.
        """
        if target.sampler.greedy and self.greedy:
            return walk(tree, target, rng, position)
        if not self.accepts(tree):
            name = type(self).__name__.lower()
            raise BadConfig(f"rule {name!r} cannot verify these trees: it needs {self.needs}")
        return self.verify(tree, target, rng, position)


def default(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """The walk for deterministic trees, sequential for drawn ones."""
    rule = sequential if tree.drawn and not target.sampler.greedy else walk
    return rule(tree, target, rng, position)


def walk(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """Samples the target at every row and follows the child that equals the sample.

    `position`: tokens generated so far, so that a node of depth d decides position + d.
    """
    node = 0
    outcome = Outcome([], None)
    known = ahead(target, rng, position, tree.depths)
    while not target.ends(node):
        if known is not None:
            token = known[node]
            if token < 0:
                raise target.fault(node)
        elif target.sampler.greedy:
            token = target.best(node)
        else:
            token = rng.sample(target.p(node), "target", position + tree.depths[node])
        child = tree.child(node, token)
        outcome.tested += [(n, n == child) for n in dict.fromkeys(tree.tries[node])]
        if child < 0:
            outcome.token = token
            break
        outcome.path.append(child)
        node = child
    return outcome


def sequential(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """At each node tries the children in order.

    x drawn from q is accepted with probability min(1, p(x)/q(x)), else p <- (p - q)+, renormalised.
    """
    node = 0
    draws = 0
    outcome = Outcome([], None)
    while not target.ends(node):
        p = target.p(node)
        accepted = -1
        for child in tree.tries[node]:
            token = tree.tokens[child]
            q = tree.laws[child]
            share = 1.0 if q is None else q.prob(token)
            draws += 1
            ratio = float(p[token]) / share if share > 0 else 0.0
            taken = rng.accept(ratio, "accept", position, draws)
            if not taken:
                rest = p.clone()
                if q is None:
                    rest[token] = 0
                else:
                    rest = (p - q.dense(len(p)).to(p)).clamp_min_(0)
                total = float(rest.sum())
                # Nothing left means that p was q up to rounding: the refusal was a rounding event.
                taken = total <= TINY
                p = p if taken else rest / total
            outcome.tested.append((child, taken))
            if taken:
                accepted = child
                break
        if accepted < 0:
            outcome.token = rng.sample(p, "target", position + tree.depths[node])
            break
        outcome.path.append(accepted)
        node = accepted
    return outcome
