"""What every executor of steps is asked, beside torch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from foretell.core.cache import Job
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.families.decoder import Decoder
from tests.families.test_families import answer


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


def mine(model: Decoder, jobs: list[Job]) -> torch.Tensor | None:
    """The logits that the executor computes; None: it leaves these jobs to torch."""
    assert model.executor is not None
    computed = model.executor(jobs, torch.get_num_threads())
    return None if computed is None else computed.logits


def grows(quick: Any, slow: Any) -> None:
    """A tree that grows level by level sees what it saw."""
    caches, text = (quick.cache(), slow.cache()), [5, 6, 7, 8]
    tree = TokenTree(8)
    for parents in ([0, 0], [1, 2, 2], [3], [3, 5, 5]):
        for i, parent in enumerate(parents):
            tree.add(parent, 20 + 3 * len(tree) + i)
        ours, theirs = (
            answer(m, c, Ask(tree), text) for m, c in zip((quick, slow), caches, strict=True)
        )
        assert ours.nodes == theirs.nodes and len(ours.nodes) == len(parents) + (parents == [0, 0])
        assert close(ours.logits, theirs.logits)
    after = [*text, *tree.words(8)]
    ours, theirs = (
        answer(m, c, Ask(TokenTree(after[-1])), after)
        for m, c in zip((quick, slow), caches, strict=True)
    )
    assert close(ours.logits, theirs.logits)


def interrupted(
    quick: Any, slow: Any, owner: type, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was stopped at the owner's `at`-th `_give` leaves nothing half done; the next
    asks for the same.
    """
    give, count, text = owner._give, [0], [5, 6, 7, 8, 9]  # type: ignore[attr-defined]

    def stopped(self: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] > at:
            raise KeyboardInterrupt
        return give(self, *args)

    quick.score(text[:3])  # other numbers of nodes and rows than what follows
    tree = TokenTree(9).chain([1, 2])
    monkeypatch.setattr(owner, "_give", stopped)
    with suppress(KeyboardInterrupt):
        quick.score(text, tree)
    monkeypatch.setattr(owner, "_give", give)
    assert close(quick.score(text, tree), slow.score(text, tree))
