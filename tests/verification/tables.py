"""Rules alone, on tables of laws: no engine, no model, only a tree, a law a node and the
enumerator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from foretell.core.distribution import Sampler, Target
from foretell.core.random import Door
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Outcome, Sampling
from foretell.testing.outcomes import Enumerator

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


class Refusing:
    """A processor, as of a grammar, that has no answer after a token that ends the text."""

    def __init__(self, stops: tuple[int, ...]):
        self.stops = stops

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text = ids[0, 1:].tolist()  # without the prompt
        assert not set(text) & set(self.stops), f"asked for what follows {text}"
        return scores


def target(
    rows: Table, tree: TokenTree, stops: tuple[int, ...] = (), temperature: float = 1.0
) -> Target:
    """The laws of a tree's nodes; to ask for one after a token of `stops` is an error."""
    logits = torch.stack([rows(tuple(tree.tokens_to(n))) for n in range(len(tree))]).log()
    sampling = Sampling(
        temperature=temperature,
        stop_token_ids=stops,
        logits_processors=(Refusing(stops),) if stops else (),
    )
    sampler = Sampler(sampling, [tree.tokens[0]], (), logits.shape[-1])
    return Target(logits, sampler, [], tree)


def committed(tree: TokenTree, outcome: Outcome) -> tuple[int, ...]:
    """The tokens of an outcome; after one that ends the text there is no other."""
    tokens = [tree.tokens[node] for node in outcome.path]
    return (*tokens, outcome.token) if outcome.token is not None else tuple(tokens)


def enumerate_rule(
    rule: Verify, tree: TokenTree, rows: Table, stops: tuple[int, ...] = ()
) -> tuple[Outputs, float]:
    """Law of the tokens one step commits, given the tree, and the expected number of accepted
    drafts.
    """
    outputs: Outputs = {}
    accepted = 0.0

    def once(door: Enumerator) -> Outcome:
        return rule(tree, target(rows, tree, stops), door, 0)

    for weight, outcome in Enumerator.walk_outcomes(once):
        tokens = committed(tree, outcome)
        outputs[tokens] = outputs.get(tokens, 0.0) + weight
        accepted += weight * len(outcome.path)
    return outputs, accepted


def joint(rows: Table, tree: TokenTree, stops: tuple[int, ...] = ()) -> Outputs:
    """The law of the tokens a step commits by following a deterministic tree as far as it goes."""
    outputs: Outputs = {}
    stack: list[tuple[int, tuple[int, ...], float]] = [(0, (), 1.0)]
    while stack:
        node, path, weight = stack.pop()
        for token, p in enumerate(rows(path).tolist()):
            child = tree.find_child(node, token)
            if p > 0 and (child < 0 or token in stops):
                outputs[(*path, token)] = weight * p
            elif p > 0:
                stack.append((child, (*path, token), weight * p))
    return outputs


def expected_acceptance(tree: TokenTree, rows: Table) -> float:
    """Of a deterministic tree: the sum of the probabilities of its nodes, the most any exact rule
    can accept.
    """
    total = 0.0
    for node in range(1, len(tree)):
        words, chance = tree.tokens_to(node), 1.0
        for i, token in enumerate(words):
            chance *= float(rows(tuple(words[:i]))[token])
        total += chance
    return total


def over_drafts(
    rule: Verify,
    draw: Callable[[Door], TokenTree],
    rows: Table,
    length: int,
    stops: tuple[int, ...] = (),
) -> tuple[Outputs, float]:
    """Law of the first `length` tokens over drafting and verification, completed by the rows;
    expected acceptance.
    """
    outputs: Outputs = {}
    accepted = 0.0

    def once(door: Enumerator) -> tuple[tuple[int, ...], int]:
        tree = draw(door)
        tree.check()
        outcome = rule(tree, target(rows, tree, stops), door, 0)
        return committed(tree, outcome), len(outcome.path)

    for weight, (tokens, count) in Enumerator.walk_outcomes(once):
        accepted += weight * count
        for path, chance in completed(tokens[:length], rows, length, stops).items():
            outputs[path] = outputs.get(path, 0.0) + weight * chance
    return outputs, accepted


def completed(
    tokens: tuple[int, ...], rows: Table, length: int, stops: tuple[int, ...] = ()
) -> Outputs:
    """The law of the first `length` tokens of a text that begins with these."""
    outputs: Outputs = {}
    stack = [(tokens, 1.0)]
    while stack:
        path, chance = stack.pop()
        if len(path) == length or (path and path[-1] in stops):
            outputs[path] = chance
            continue
        for token, p in enumerate(rows(path).tolist()):
            if p > 0:
                stack.append(((*path, token), chance * p))
    return outputs


def plain(rows: Table, length: int, stops: tuple[int, ...] = ()) -> Outputs:
    """The law of the first `length` tokens by the chain rule."""
    return completed((), rows, length, stops)


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
                    token = door.sample(law.probs, "draft", 0, key)
                    value = tree.values[node] * law.token_prob(token)
                    child = tree.add(node, token, law=law, value=value)
                    below[child] = below.get(child, 0) + 1
            level = below
        return tree

    return draw


def differs(a: Outputs, b: Outputs) -> float:
    """Total variation."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b}) / 2
