"""Drawing for all nodes at once: token by token what drawing one by one gives, with one answer to
wait for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from foretell.core import draws
from foretell.core.distribution import Sampler, Target
from foretell.core.random import Rng
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.native import library
from foretell.native import rows as native
from foretell.testing.outcomes import Enumerator
from foretell.verification.acceptance import walk_tree
from tests import tiny
from tests.verification.tables import table

WAITS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__int__",
    "__float__",
    "__bool__",
    "__index__",
}
VOCAB = 50
TREE = TokenTree(0).chain([3, 4, 5]).chain([6, 7]).chain([8, 3], at=1)


class Waits(TorchFunctionMode):
    """Counts what a host waits for on a device of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in WAITS
        return func(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device counts as one of its own."""
    monkeypatch.setattr(draws, "lies_off_cpu", lambda rows: True)


def target(sampling: Sampling, seed: int, tree: TokenTree = TREE) -> Target:
    # Children are likely, so that walks go deep.
    rows = torch.randn(len(tree), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    for node in range(1, len(tree)):
        rows[tree.parents[node], tree.tokens[node]] = 6.0
    return Target(rows, Sampler(sampling, [1], (), VOCAB), [], tree)


@given(
    st.integers(0, 9999),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_the_same_numbers_give_the_same_tokens(
    seed: int, dtype: torch.dtype, count: int, width: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    laws = torch.rand(count, width, dtype=dtype, generator=source)
    laws[torch.rand(count, width, generator=source) < 0.4] = 0
    laws[:, seed % width] += 0.1
    laws /= laws.sum(-1, keepdim=True)
    uniforms = torch.rand(count, dtype=torch.float64, generator=source).tolist()
    for edge in (
        0.0,
        0.5,
        1 - 2.0**-53,
        1.0,
    ):  # the last stands for a product rounded up to the total
        uniforms[seed % count] = edge
        got = draws.draw_by_uniforms(laws, uniforms)
        assert got == [draws.draw_token(p, u) for p, u in zip(laws, uniforms, strict=True)]
        assert all(p[token] > 0 for p, token in zip(laws, got, strict=True))


SAMPLINGS = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.9},
]


@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
def test_a_walk_is_the_same_for_every_seed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, deep = Sampling(**{"temperature": 1.0, **options}), 0
    for seed in range(60):
        outcomes = []
        for together in (False, True):
            monkeypatch.setattr(draws, "lies_off_cpu", lambda rows, together=together: together)
            made = target(sampling, seed)
            assert (draws.draw_ahead(made, Rng(seed), 5, TREE.depths) is not None) == together
            outcomes.append(walk_tree(TREE, made, Rng(seed), 5))
        one, all_ = outcomes
        assert (one.path, one.token, one.tested) == (all_.path, all_.token, all_.tested)
        deep += len(one.path) > 1
    assert deep > 5


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_waits_once(temperature: float) -> None:
    for seed in range(20):
        made = target(Sampling(temperature=temperature, top_p=0.95, top_k=40), seed)
        with Waits() as waits:
            outcome = walk_tree(TREE, made, Rng(seed), 0)
        assert waits.count == 1
    with pytest.MonkeyPatch.context() as patch, Waits() as waits:  # and the counter counts
        patch.setattr(draws, "draw_ahead", None)
        patch.setattr("foretell.verification.acceptance.draw_ahead", lambda *_: None)
        one = walk_tree(TREE, made, Rng(seed), 0)
    assert waits.count > len(one.path) and one == outcome


@given(st.integers(0, 999), st.integers(1, 700), st.integers(0, 64))
def test_the_library_draws_as_torch_does(seed: int, width: int, part: int) -> None:
    source = torch.Generator().manual_seed(seed)
    # Sums of whole numbers are exact, so that a number may lie on the edge of a token.
    law = torch.randint(0, 3, (width,), generator=source).float()
    law[int(torch.randint(width, (), generator=source))] += 1
    numbers = [part / 64 * (1 - 1e-16), min(part / 64, 1 - 1e-16), 1 - 1e-16]
    found = [draws.draw_token(law, u) for u in numbers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "reads_in_library", lambda rows: False)
        assert found == [draws.draw_token(law, u) for u in numbers]
    assert all(float(law[token]) > 0 for token in found)


def test_a_law_without_a_sum_is_not_drawn_from_in_the_library() -> None:
    if not library.is_available():
        pytest.skip("no C library")
    for law in (torch.zeros(5), torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])):
        assert native.draw_token(law, 0.5) == -1


@pytest.mark.usefixtures("elsewhere")
def test_the_door_for_every_outcome_is_asked_node_by_node() -> None:
    tree, rows = TokenTree(0).chain([1, 2]).chain([2, 0]), table(5, 3)
    logits = torch.stack([rows(tuple(tree.tokens_to(n))) for n in range(len(tree))]).log()

    def once(door: Enumerator) -> tuple[int, ...]:
        made = Target(logits, Sampler(Sampling(temperature=1.0), [0], (), 3), [], tree)
        outcome = walk_tree(tree, made, door, 0)
        assert len(door.used) == 1 + len(outcome.path)
        return (*(tree.tokens[n] for n in outcome.path), outcome.token)

    found = list(Enumerator.walk_outcomes(once))
    assert sum(weight for weight, _ in found) == pytest.approx(1)
    assert {text[0] for _, text in found} == {0, 1, 2}
    assert sum(w for w, text in found if text[:2] == (1, 2)) == pytest.approx(
        float(rows(())[1] * rows((1,))[2])
    )


@pytest.mark.usefixtures("elsewhere")
def test_a_law_that_depends_on_the_path_is_found_when_it_is_needed() -> None:
    made = target(Sampling(temperature=1.0, repetition_penalty=1.2), 0)
    assert draws.draw_ahead(made, Rng(0), 0, TREE.depths) is None
    assert (
        draws.draw_ahead(target(Sampling(no_repeat_ngram_size=2), 0), Rng(0), 0, TREE.depths)
        is None
    )


def test_texts_are_the_same_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for together in (False, True):
        monkeypatch.setattr(draws, "lies_off_cpu", lambda rows, together=together: together)
        lm = tiny.lm()
        texts.append(
            [
                [
                    s.tokens
                    for s in lm.generate(
                        "def add(a, b):",
                        spec,
                        max_new_tokens=24,
                        n=2,
                        seed=4,
                        top_p=0.9,
                        temperature=1.1,
                    ).samples
                ]
                for spec in ("plain", "ngram", "token-recycling:nodes=8", "draft:nodes=6")
            ]
        )
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][1] == texts[0][2]
