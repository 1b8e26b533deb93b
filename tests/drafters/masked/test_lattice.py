"""Candidates of a lattice, and the path through it against all paths there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from foretell.drafters.masked import lattice as module
from foretell.drafters.masked.lattice import Column, best_path, build_lattice, search_path

END = 4


def rows(count: int, vocab: int = 7, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return 2 * torch.randn(count, vocab, dtype=torch.float64)


def causal(path: Sequence[int], token: int) -> float:
    """A law that depends on the whole path, as no position's own does."""
    key = hash((*path, token))
    return 0.05 + (key % 997) / 1100


def by_hand(logits: torch.Tensor, mass: float, most: int) -> list[list[int]]:
    """Tokens of each position, added one by one."""
    found = []
    for p in logits.softmax(-1).tolist():
        order = sorted(range(len(p)), key=lambda token: -p[token])
        kept: list[int] = []
        while len(kept) < most and sum(p[token] for token in kept) < mass:
            kept.append(order[len(kept)])
        found.append(kept + [END] * (END not in kept))
        if order[0] == END:
            break
    return found


@pytest.mark.parametrize(("mass", "most"), [(0.8, 15), (0.8, 2), (0.3, 3), (1.0, 4), (0.0, 15)])
def test_the_fewest_tokens_of_a_mass_and_always_the_end(mass: float, most: int) -> None:
    for seed in range(6):
        logits = rows(5, seed=seed)
        columns = build_lattice(logits, (END,), mass, most)
        want = by_hand(logits, mass, most) if mass else [[END]] * len(columns)
        assert [[token for token, _ in column] for column in columns] == want
        laws = logits.log_softmax(-1)
        for place, column in enumerate(columns):
            assert [log for _, log in column] == pytest.approx(
                [float(laws[place, token]) for token, _ in column]
            )


def test_nothing_stands_behind_a_position_whose_best_token_is_the_end() -> None:
    logits = rows(5)
    logits[:, END] -= 9.0
    logits[2, END] = 99.0
    assert len(build_lattice(logits, (END,), 0.8, 15)) == 3
    assert len(best_path(logits, (END,))) == 3 and best_path(logits, (END,))[-1][0] == END
    assert len(build_lattice(logits, (), 0.8, 15)) == 5
    logits[:, END] = -math.inf
    assert END not in {
        token for column in build_lattice(logits, (END,), 0.8, 15) for token, _ in column
    }


def best_of_all(columns: Sequence[Column], weight: float) -> tuple[int, ...]:
    """Every path, each up to its first end."""
    scores: dict[tuple[int, ...], float] = {}
    for choice in itertools.product(*columns):
        tokens = [token for token, _ in choice]
        size = tokens.index(END) + 1 if END in tokens else len(tokens)
        score = 0.0
        for place, (token, log) in enumerate(choice[:size]):
            score += weight * log + (1 - weight) * math.log(causal(tokens[:place], token))
        scores[tuple(tokens[:size])] = score
    return max(scores, key=scores.__getitem__)


def tokens_of(columns: Sequence[Column], beam: int, weight: float) -> tuple[int, ...]:
    return tuple(token for token, _ in search_path(columns, (END,), beam, weight, causal))


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.5, 1.0])
def test_a_wide_beam_finds_the_best_of_all_paths(weight: float) -> None:
    narrow = 0
    for seed in range(8):
        columns = build_lattice(rows(4, seed=seed), (END,), 0.8, 3)
        assert tokens_of(columns, 999, weight) == best_of_all(columns, weight)
        narrow += tokens_of(columns, 1, weight) != best_of_all(columns, weight)
    assert narrow or weight in (0.0, 1.0), "a narrow beam finds them as well: nothing was searched"


def test_one_path_of_the_model_alone_is_the_best_token_of_each_position() -> None:
    for seed in range(8):
        logits = rows(6, seed=seed)
        logits[:, END] -= 4
        columns = build_lattice(logits, (END,), 0.8, 15)
        path = search_path(columns, (END,), 1, 1.0, causal)
        assert path == best_path(logits, (END,))
        assert [token for token, _ in path] == logits.argmax(-1).tolist()[: len(path)]


def test_a_score_that_forgets_the_causal_law_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip: its logarithm is taken of 1."""
    monkeypatch.setattr(module.math, "log", lambda x: 0.0)
    columns = build_lattice(rows(4, seed=1), (END,), 0.8, 3)
    found = [tokens_of(build_lattice(rows(4, seed=s), (END,), 0.8, 3), 999, 0.3) for s in range(8)]
    monkeypatch.undo()
    want = [best_of_all(build_lattice(rows(4, seed=s), (END,), 0.8, 3), 0.3) for s in range(8)]
    assert columns and found != want
