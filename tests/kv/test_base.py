"""What cache policies are made of: lengths at which rows change, and sums of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, Unsupported
from foretell.kv.base import NEVER, Attended, Evicting, top_rows
from foretell.kv.evict.h2o import H2O
from foretell.kv.evict.tova import Newest
from foretell.testing.toy import ToyRecurrent
from tests.kv.policies import target

TEXT = [(11 * i + i * i) % 90 for i in range(14)]


@dataclass
class All(Attended):
    def counts_token(self, place: int) -> bool:
        return True

    def evict_rows(self, cache: Any) -> None:
        raise AssertionError("there is room for everything")


@pytest.mark.parametrize(("prompt", "changes"), [(30, [30, 33, 36]), (4, [13, 16, 19])])
def test_rows_change_behind_a_long_prompt_or_when_there_are_too_many(
    prompt: int, changes: list[int]
) -> None:
    policy = Evicting(10, 3)
    policy.begin_text(prompt)
    length, seen = 0, []
    while len(seen) < 3:
        assert policy.next_change(length) == length + policy.room_left(length)
        length = policy.next_change(length)
        seen.append(length)
    assert seen == changes
    assert policy.room_of(0, 30) == 30 and policy.room_of(0, 4) == 13
    policy = Evicting(10, 0)
    policy.begin_text(prompt)
    assert policy.room_left(30) > NEVER // 2


@pytest.mark.parametrize(("prompt", "first"), [(7, 13), (10, 13), (11, 11), (21, 21)])
def test_rows_are_given_up_at_due_lengths_alone(prompt: int, first: int) -> None:
    policy = Evicting(budget=10, every=3)
    policy.begin_text(prompt)
    assert [at for at in range(50) if policy.evicts_at(at)] == list(range(first, 50, 3))


@pytest.mark.parametrize(("prompt", "want"), [(10, []), (11, [11])])
def test_without_every_rows_are_given_up_behind_a_prompt_alone(
    prompt: int, want: list[int]
) -> None:
    policy = Evicting(budget=10, every=0)
    policy.begin_text(prompt)
    assert [at for at in range(50) if policy.evicts_at(at)] == want
    assert policy.room_left(30) > NEVER // 2


def test_a_piece_that_ends_early_evicts_nothing() -> None:
    """TOVA's pieces end before the newest token, which judges."""
    evicted: list[int] = []

    class Spied(Newest):
        def evict_rows(self, cache: Any) -> None:
            evicted.append(cache.length)

    class Grown:
        length, base = 0, 99

    policy, cache = Spied(10, 3), Grown()
    policy.begin_text(21)
    while cache.length < 40:
        cache.length += policy.room_left(cache.length)
        policy.change_rows(cache)
    assert evicted == list(range(21, 40, 3))


def test_of_equal_scores_the_later_is_better() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 3.0, 0.0]])
    assert top_rows(scores, 3).tolist() == [[3, 1, 2]]


def attention(model: Any, text: list[int]) -> list[torch.Tensor]:
    """Of each layer what every row of a text got (KV, rows), by transformers' own attention."""
    model.hf.set_attn_implementation("eager")
    ids = torch.tensor([text])
    weights = model.hf(ids, use_cache=False, output_attentions=True).attentions
    heads = model.layout[0][0]
    return [layer[0].unflatten(0, (heads, -1)).mean(1).sum(1) for layer in weights]


@torch.inference_mode()
@pytest.mark.parametrize("pieces", [[13], [5, 8], [1] * 13])
def test_sums_are_those_of_a_plain_forward_and_rejected_nodes_leave_no_trace(
    pieces: list[int],
) -> None:
    model = target()
    cache = model.cache()
    cache.use(All(99, 1), 13)
    done = 0
    for size in pieces:
        text = TEXT[: done + size + 1]
        tree = TokenTree(text[-1])
        if done + size < 13:
            wrong = tree.add(0, (TEXT[done + size + 1] + 1) % 90)
            tree.add(wrong, 3)
            tree.add(0, TEXT[done + size + 1])
        job, whole = cache.prepare(Ask(tree), text, 99)
        model.forward([job])
        assert whole
        done += size
    cache.commit([*TEXT, 0])
    policy: Any = cache.policy
    assert cache.length == 14
    for layer, want in enumerate(attention(model, TEXT)):
        got = policy.received[layer]
        assert torch.allclose(got, want, atol=1e-5)
        assert torch.allclose(got.sum(-1), torch.full((2,), 14.0), atol=1e-4)


@torch.inference_mode()
def test_a_fork_has_sums_of_its_own() -> None:
    model = target()
    cache = model.cache()
    cache.use(All(99, 1), 8)
    text = TEXT[:9]
    job, _ = cache.prepare(Ask(TokenTree(text[-1])), text, 99)
    model.forward([job])
    twin = cache.fork()
    cache.commit([*text, 5])
    mine: Any = cache.policy
    others: Any = twin.policy
    assert mine.received[0].shape == (2, 9) and not others.received
    twin.commit([*text, 6])
    assert torch.equal(others.received[0], mine.received[0])


def test_bad_settings_and_models_without_such_rows_are_refused_by_name() -> None:
    with pytest.raises(BadConfig, match=r"h2o:budget=1: .*at least 2"):
        H2O(budget=1)
    with pytest.raises(BadConfig, match="h2o:every=0"):
        H2O(every=0)
    with pytest.raises(Unsupported, match=r"kv=h2o.* recurrent"):
        H2O().build_policy(ToyRecurrent())
    with pytest.raises(Unsupported, match=r"kv=h2o.*see a window"):
        H2O().build_policy(target("gemma2"))
