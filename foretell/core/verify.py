"""Verification: (tree, target laws, randomness) -> which drafted path is accepted and what follows
it.

Here are the two rules everything rests on and the base of all. `walk` follows the target's own
samples: exact on any tree, optimal for deterministic ones, seed by seed the plain decoder's tokens.
`sequential` is recursive rejection over a node's tries: exact for any mixture of laws, and it
accepts more of drawn tokens. More rules stand in `rules/`; each says which trees it accepts and
refuses the rest: a tree verified with the wrong law is silently biased.
"""

from __future__ import annotations

from foretell.core.rng import Door
from foretell.core.sampling import Target
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.errors import BadConfig
from foretell.ops.draws import ahead

TINY = 1e-12


class Rule:
    """The base of a rule, which is a frozen dataclass with `verify`; see verify.walk for what that
    is given.
    """

    needs = "any tree"  # in words, for the error
    exact = greedy = True  # its law is the target's; at temperature 0 it is the walk

    def accepts(self, tree: TokenTree) -> bool:
        return True  # of any laws and shape

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        raise NotImplementedError

    def __call__(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        """Verifies; with a greedy target nearly every rule is the walk. Raises BadConfig for a tree
        it refuses.
        """
        if target.sampler.greedy and self.greedy:
            return walk(tree, target, rng, position)
        if not self.accepts(tree):
            raise BadConfig(
                f"rule {type(self).__name__.lower()!r} cannot verify these trees: it needs {self.needs}"
            )
        return self.verify(tree, target, rng, position)


def default(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """The walk for deterministic trees, sequential for drawn ones."""
    return (sequential if tree.drawn and not target.sampler.greedy else walk)(
        tree, target, rng, position
    )


def walk(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """Samples the target at every row and follows the child that equals the sample.

    `position`: tokens generated so far, so that a node of depth d decides position + d.
    """
    node, outcome, found = 0, Outcome([], -1), ahead(target, rng, position, tree.depths)
    while True:
        if found is not None:
            token = found[node]
        elif target.sampler.greedy:
            token = target.best(node)
        else:
            token = rng.sample(target.p(node), "target", position + tree.depths[node])
        child = tree.child(node, token)
        outcome.tested += [(n, n == child) for n in dict.fromkeys(tree.tries[node])]
        if child < 0:
            outcome.token = token
            return outcome
        outcome.path.append(child)
        node = child


def sequential(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """At each node tries the children in order: x from law q is accepted with min(1, p(x)/q(x)),
    else p <- (p - q)+.
    """
    node, tries, outcome = 0, 0, Outcome([], -1)
    while True:
        p = target.p(node)
        accepted = -1
        for child in tree.tries[node]:
            token, q = tree.tokens[child], tree.laws[child]
            share = 1.0 if q is None else q.prob(token)
            tries += 1
            ratio = float(p[token]) / share if share > 0 else 0.0
            taken = rng.accept(ratio, "accept", position, tries)
            if not taken:
                rest = p.clone()
                if q is None:
                    rest[token] = 0
                else:
                    rest = (p - q.dense(len(p)).to(p)).clamp_min_(0)
                total = float(rest.sum())
                # Nothing left means p was q up to rounding: the refusal was a rounding event.
                taken = total <= TINY
                p = p if taken else rest / total
            outcome.tested.append((child, taken))
            if taken:
                accepted = child
                break
        if accepted < 0:
            outcome.token = rng.sample(p, "target", position + tree.depths[node])
            return outcome
        outcome.path.append(accepted)
        node = accepted
