"""H2O against loops over transformers' own attention."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from foretell.errors import BadConfig
from foretell.kv.evict.h2o import H2O
from tests.kv.policies import PROMPT
from tests.kv.twin import Rows, Twin, by_engine, by_loops, grouped, same

TOKENS = 14


class Loops(Twin):
    """`slip` names a mistake."""

    def __init__(self, kv: H2O, slip: str = "") -> None:
        self.kv, self.slip = kv, slip
        self.sums: dict[int, list[list[float]]] = {}

    def change(self, length: int, prompt: int, rows: Rows, weights: list[torch.Tensor]) -> None:
        for layer, pair in enumerate(rows):
            heads, count, _ = pair[0].shape
            given = grouped(weights[layer], heads).sum(1).tolist()
            sums = self.sums.setdefault(layer, [[] for _ in range(heads)])
            for head in range(heads):
                sums[head] += [0.0] * (count - len(sums[head]))
                before = [0.0] * count if self.slip == "last only" else sums[head]
                sums[head] = [a + b for a, b in zip(before, given[head], strict=True)]
            first = prompt if prompt > self.kv.budget else self.kv.budget + self.kv.every
            due = length >= first and (length - first) % self.kv.every == 0
            if not due or count <= self.kv.budget:
                continue
            recent = self.kv.recent or self.kv.budget // 2
            stays = []
            for head in range(heads):
                older = sorted(range(count - recent), key=lambda row: sums[head][row])
                heavy = older[-(self.kv.budget - recent) :]
                if self.slip == "light":
                    heavy = older[: self.kv.budget - recent]
                stays.append(sorted(heavy) + list(range(count - recent, count)))
                sums[head] = [sums[head][row] for row in stays[head]]
            for part in (0, 1):
                old = pair[part]
                pair[part] = torch.stack([old[h, stays[h]] for h in range(heads)])


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:6]], ids=["long", "short"])
@pytest.mark.parametrize("kv", [H2O(10, every=1), H2O(10, recent=3, every=4)])
def test_it_keeps_the_rows_that_loops_keep(kv: H2O, prompt: list[int]) -> None:
    output, held = by_engine(kv, prompt, TOKENS)
    assert same(held, by_loops(Loops(kv), prompt, output))


@pytest.mark.parametrize("slip", ["last only", "light"])
def test_a_slip_is_noticed(slip: str) -> None:
    kv = H2O(10, every=1)
    output, held = by_engine(kv, PROMPT, TOKENS)
    assert not same(held, by_loops(Loops(kv, slip), PROMPT, output))


def test_a_node_gives_one_to_every_head() -> None:
    kv = H2O(10, every=100)  # evicts after the prompt alone
    policies: list[tuple[int, object]] = []
    by_engine(kv, PROMPT, TOKENS, policies)
    sums = {length: policy.received for length, policy in policies}  # type: ignore[attr-defined]
    lengths = sorted(sums)
    assert len(lengths) > 8
    for before, after in pairwise(lengths):
        for layer, received in sums[after].items():
            assert received.shape[1] == sums[before][layer].shape[1] + after - before
            grown = received.sum(1) - sums[before][layer].sum(1)
            assert torch.allclose(grown, torch.full_like(grown, after - before), atol=1e-9)


@pytest.mark.parametrize(("budget", "recent"), [(1, 0), (4, 4)])
def test_a_budget_without_room_for_others_is_refused(budget: int, recent: int) -> None:
    with pytest.raises(BadConfig, match="h2o:budget"):
        H2O(budget, recent)
