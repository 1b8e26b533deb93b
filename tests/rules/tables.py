"""Rules alone, on tables of laws: no engine, no model, only a tree, a law a node and the
enumerator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from foretell.core.rng import Door
from foretell.core.sampling import Sampler, Target
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Outcome, Sampling
from foretell.measure.outcomes import Enumerator

Table = Callable[[tuple[int, ...]], torch.Tensor]  # a path -> the law (V,) of the token after it
Outputs = dict[tuple[int, ...], float]
Verify = Callable[[TokenTree, Target, Door, int], Outcome]


def table(seed: int, vocab: int, zeros: bool = False) -> Table:
    """A random law for every path, with some tokens impossible if `zeros`."""

    def law(path: tuple[int, ...]) -> torch.Tensor:
        key = seed * 7919 + sum((token + 1) * 31**i for i, token in enumerate(path, 1))
        draw = torch.Generator().manual_seed(key)
        p = torch.rand(vocab, dtype=torch.float64, generator=draw) ** 2 + 0.01
        if zeros:
            p[torch.randint(vocab, (1,), generator=draw)] = 0
        return p / p.sum()

    return law


def without(law: Law, tokens: list[int]) -> Law:
    """The dense law of a draw that is known not to be one of `tokens`."""
    probs = law.probs.clone()
    probs[tokens] = 0
    return Law(probs / probs.sum())


def target(rows: Table, tree: TokenTree) -> Target:
    logits = torch.stack([rows(tuple(tree.tokens_to(n))) for n in range(len(tree))]).log()
    sampler = Sampler(Sampling(temperature=1.0), [tree.tokens[0]], (), logits.shape[-1])
    return Target(logits, sampler, [], tree)


def enumerate_rule(rule: Verify, tree: TokenTree, rows: Table) -> tuple[Outputs, float]:
    """Law of the tokens one step commits, given the tree, and the expected number of accepted
    drafts.
    """
    outputs: Outputs = {}
    accepted = 0.0
    for weight, outcome in Enumerator.walk(lambda door: rule(tree, target(rows, tree), door, 0)):
        tokens = (*(tree.tokens[n] for n in outcome.path), outcome.token)
        outputs[tokens] = outputs.get(tokens, 0.0) + weight
        accepted += weight * len(outcome.path)
    return outputs, accepted


def joint(rows: Table, tree: TokenTree) -> Outputs:
    """The law of the tokens a step commits by following a deterministic tree as far as it goes."""
    outputs: Outputs = {}
    stack: list[tuple[int, tuple[int, ...], float]] = [(0, (), 1.0)]
    while stack:
        node, path, weight = stack.pop()
        for token, p in enumerate(rows(path).tolist()):
            child = tree.child(node, token)
            if p > 0 and child < 0:
                outputs[(*path, token)] = weight * p
            elif p > 0:
                stack.append((child, (*path, token), weight * p))
    return outputs


def expected_acceptance(tree: TokenTree, rows: Table) -> float:
    """Of a deterministic tree: the sum of the chances of its nodes, the most any exact rule can
    accept.
    """
    total = 0.0
    for node in range(1, len(tree)):
        words, chance = tree.tokens_to(node), 1.0
        for i, token in enumerate(words):
            chance *= float(rows(tuple(words[:i]))[token])
        total += chance
    return total


def over_drafts(
    rule: Verify, draw: Callable[[Door], TokenTree], rows: Table, length: int
) -> tuple[Outputs, float]:
    """Law of the first `length` tokens over drafting and verification, completed by the rows;
    expected acceptance.
    """
    outputs: Outputs = {}
    accepted = 0.0

    def once(door: Enumerator) -> tuple[tuple[int, ...], int]:
        tree = draw(door)
        tree.check()
        outcome = rule(tree, target(rows, tree), door, 0)
        return (*(tree.tokens[n] for n in outcome.path), outcome.token), len(outcome.path)

    for weight, (tokens, count) in Enumerator.walk(once):
        accepted += weight * count
        stack = [(tokens[:length], weight)]
        while stack:
            path, chance = stack.pop()
            if len(path) == length:
                outputs[path] = outputs.get(path, 0.0) + chance
            else:
                stack += [
                    ((*path, t), chance * p) for t, p in enumerate(rows(path).tolist()) if p > 0
                ]
    return outputs, accepted


def plain(rows: Table, length: int) -> Outputs:
    """The law of the first `length` tokens by the chain rule."""
    laws: Outputs = {(): 1.0}
    for _ in range(length):
        laws = {
            (*path, t): w * p
            for path, w in laws.items()
            for t, p in enumerate(rows(path).tolist())
            if p > 0
        }
    return laws


def chain(draft: Table, length: int) -> Callable[[Door], TokenTree]:
    """Draws a chain from the draft's laws."""
    return copies(draft, length, 1)


def copies(draft: Table, length: int, count: int) -> Callable[[Door], TokenTree]:
    """Draws `count` chains independently and merges them by prefix."""

    def draw(door: Door) -> TokenTree:
        tree, key = TokenTree(0), 0
        level = {0: count}
        for _ in range(length):
            below: dict[int, int] = {}
            for node, copies_here in level.items():
                law = Law(draft(tuple(tree.tokens_to(node))))
                for _ in range(copies_here):
                    key += 1
                    child = tree.add(node, door.sample(law.probs, "draft", 0, key), law)
                    below[child] = below.get(child, 0) + 1
            level = below
        return tree

    return draw


def differs(a: Outputs, b: Outputs) -> float:
    """Total variation."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b}) / 2
