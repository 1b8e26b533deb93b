"""What every backend is asked, beside torch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from foretell import LM
from foretell.cache.job import Job
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.models.decoder.decoder import Decoder
from tests.models.decoder.test_families import answer
from tests.tiny import CONTEXT


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


def backend_logits(model: Decoder, jobs: list[Job]) -> torch.Tensor | None:
    """The logits that the backend computes; None: it leaves these jobs to torch."""
    assert model.backend is not None
    computed = model.backend(jobs, torch.get_num_threads())
    return None if computed is None else computed.logits


def growing_trees_agree(quick: Any, slow: Any) -> None:
    """A tree that grows level by level, and the step after it."""
    quick_cache, slow_cache = quick.cache(), slow.cache()
    text = [5, 6, 7, 8]

    def both(tree: TokenTree, tokens: list[int]) -> list[int]:
        ours = answer(quick, quick_cache, Ask(tree), tokens)
        theirs = answer(slow, slow_cache, Ask(tree), tokens)
        assert ours.nodes == theirs.nodes and close(ours.logits, theirs.logits)
        return ours.nodes

    tree = TokenTree(8)
    for level, parents in enumerate(([0, 0], [1, 2, 2], [3], [3, 5, 5])):
        for i, parent in enumerate(parents):
            tree.add(parent, 20 + 3 * len(tree) + i)
        root = 1 if level == 0 else 0
        assert len(both(tree, text)) == len(parents) + root
    after = [*text, *tree.tokens_to(8)]
    both(TokenTree(after[-1]), after)


def interruptions_leave_nothing_half_done(
    quick: Any, slow: Any, owner: type, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is stopped at the owner's `at`-th `_bind_value`; the next one is given the same."""
    give = owner._bind_value  # type: ignore[attr-defined]
    text = [5, 6, 7, 8, 9]
    calls = 0

    def stopped(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > at:
            raise KeyboardInterrupt
        return give(self, *args)

    quick.score(text[:3])  # other numbers of nodes and rows than what follows
    tree = TokenTree(9).chain([1, 2])
    monkeypatch.setattr(owner, "_bind_value", stopped)
    with suppress(KeyboardInterrupt):
        quick.score(text, tree)
    monkeypatch.setattr(owner, "_bind_value", give)
    assert close(quick.score(text, tree), slow.score(text, tree))


def agree(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    """Whether each row is as near, in its own length. Another node's would be about 1.4 away."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    distance = (ours - theirs).float().norm(dim=-1)
    return bool((distance <= tolerance * theirs.float().norm(dim=-1)).all())


def computed_by(model: Decoder) -> Any:
    """The backend, whose next forward can be noticed by its size."""
    assert model.backend is not None
    model.backend.size = 0
    return model.backend


def hidden_states_are_those_of_torch(
    quick: Decoder, slow: Decoder, tolerance: float = 1e-4, batches: bool = True, longest: int = 99
) -> None:
    """Of single nodes, chains and trees, below nothing and below a text, in batches and in pieces.

    `longest`: a text of so many tokens is still the backend's.
    """
    taps = (0, 1, len(quick.layout))
    text = [(7 * i) % 300 for i in range(20)]
    last = text[-1]
    wide = TokenTree(last).chain([3, 4]).chain([5, 6], at=0).chain([8, 9, 10], at=1)
    trees = [TokenTree(last), TokenTree(last).chain([3, 4, 5]), wide]

    def same(ask: Ask, tokens: list[int], caches: tuple[Any, Any], by_backend: bool = True) -> None:
        backend = computed_by(quick)
        ours, theirs = (
            answer(model, cache, ask, tokens)
            for model, cache in zip((quick, slow), caches, strict=True)
        )
        assert ours.nodes == theirs.nodes and set(ours.hidden) == set(ask.taps)
        assert agree(ours.logits, theirs.logits, tolerance)
        for tap in ask.taps:
            assert agree(ours.hidden[tap], theirs.hidden[tap], tolerance), tap
        assert bool(backend.size) == by_backend

    for tree in trees:
        for rows in (None, [], [len(tree) - 1]):
            caches = quick.cache(), slow.cache()
            same(Ask(tree, rows=rows, taps=taps), text, caches)
            after = [*text, *tree.tokens[1:2], 11]
            same(Ask(TokenTree(11), taps=taps[1:]), after, caches)

    # Nodes that do not see all rows of the level before.
    grown, caches = TokenTree(last), (quick.cache(), slow.cache())
    for parents in ([0, 0], [1, 2, 2], [3], [3, 5, 5]):
        for parent in parents:
            grown.add(parent, 20 + 3 * len(grown))
        same(Ask(grown, taps=taps), text, caches)

    long = [(11 * i) % 300 for i in range(min(longest, CONTEXT - 10))]
    same(Ask(TokenTree(long[-1]).chain([1, 2]), taps=taps), long, (quick.cache(), slow.cache()))

    if batches:
        for several in ([wide, trees[1]], [trees[0], trees[0]], [trees[1], wide]):
            jobs = [quick.cache().prepare(Ask(tree, taps=taps), text, 999)[0] for tree in several]
            backend = computed_by(quick)
            replies = quick.forward(jobs)
            assert backend.size
            for tree, reply in zip(several, replies, strict=True):
                theirs = answer(slow, slow.cache(), Ask(tree, taps=taps), text)
                for tap in taps:
                    assert agree(reply.hidden[tap], theirs.hidden[tap], tolerance), tap

    # What was handed out is not overwritten by later forwards of the same size and cache.
    cache = quick.cache()
    answer(quick, cache, Ask(TokenTree(last), taps=taps), text)
    kept = answer(quick, cache, Ask(trees[1], taps=taps), text).hidden
    copies = {tap: states.clone() for tap, states in kept.items()}
    for token in range(10, 15):
        tree = TokenTree(last).chain([token, 7, 9])
        later = answer(quick, cache, Ask(tree, taps=taps), text).hidden
        assert later[0].shape == kept[0].shape
    assert all(torch.equal(kept[tap], copies[tap]) for tap in taps)


def refuses_what_is_not_plain(quick: Decoder) -> None:
    """Alone, and beside a plain job."""
    assert quick.backend is not None
    text = [5, 6, 7]
    subset = quick.cache().prepare(Ask(TokenTree(7), layers=(0,)), text, 999)[0]
    given = Ask(TokenTree(7), states=quick.embed([7]))
    entered = quick.cache().prepare(given, text, 999)[0]
    plain = quick.cache().prepare(Ask(TokenTree(7)), text, 999)[0]
    for jobs in ([subset], [entered], [plain, subset], [entered, plain]):
        assert quick.backend(jobs, torch.get_num_threads()) is None


def other_texts_stay_the_same(lm: LM) -> None:
    """Once hidden states were asked for, greedy texts and samples are what they were."""

    def texts() -> list[list[int]]:
        found = []
        for method in ("plain", "suffix+token-recycling"):
            for more in ({}, {"temperature": 0.9, "seed": 3}):
                out = lm.generate("def add(a, b):", method, max_new_tokens=24, **more)
                found.append(out.tokens)
        return found

    before = texts()
    model = lm.models["target"]
    assert isinstance(model, Decoder)
    backend = computed_by(model)
    answer(model, model.cache(), Ask(TokenTree(7), taps=(1,)), [5, 6, 7])
    assert backend.size
    assert texts() == before
