"""`tova` gives up what the newest token attends to the least, as a loop over lists does."""

from __future__ import annotations

import pytest
import torch

from foretell.errors import BadConfig
from foretell.kv.evict.tova import Newest, Tova
from foretell.spec import build_cache_policy
from tests.kv.loops import LoopLlama, check
from tests.kv.policies import PROMPT


def twin(kv: Tova) -> LoopLlama:
    def evict(loop: LoopLlama) -> None:
        for heads in loop.rows:
            count = len(heads[0])
            if not (count >= kv.budget + kv.every or loop.length == len(PROMPT)):
                continue
            mean = [sum(rows[i].newest for rows in heads) / len(heads) for i in range(count)]
            lowest = sorted(range(count), key=lambda i: (mean[i], i))[: max(0, count - kv.budget)]
            for rows in heads:
                rows[:] = [row for i, row in enumerate(rows) if i not in lowest]

    return check(kv, False, evict, PROMPT, 24)


@pytest.mark.parametrize("spec", ["budget=9", "budget=8,every=4", "budget=26", "budget=1"])
def test_it_is_the_loop(spec: str) -> None:
    kv = build_cache_policy(f"tova:{spec}")
    assert isinstance(kv, Tova)
    loop = twin(kv)
    kept = [[[row.place for row in rows] for rows in heads] for heads in loop.rows]
    assert all(heads[0] == heads[1] for heads in kept)  # all heads of a layer keep the same
    if kv.budget in (8, 9):
        assert kept[0] != kept[1] and kept[0][0][-3] > 0  # no layer as another


def by_all(self: Newest, place: int) -> bool:
    return True


def by_the_last_but_one(self: Newest, place: int) -> bool:
    return place == self.next_change(place) - 2


def each_head(self: Newest, cache: object, layer: int, received: torch.Tensor) -> torch.Tensor:
    return received.topk(self.budget, -1).indices


@pytest.mark.parametrize(
    ("name", "slip"),
    [("counts_token", by_all), ("counts_token", by_the_last_but_one), ("choose_rows", each_head)],
)
def test_the_loop_catches_slips(monkeypatch: pytest.MonkeyPatch, name: str, slip: object) -> None:
    monkeypatch.setattr(Newest, name, slip)
    with pytest.raises((AssertionError, KeyError)):
        twin(Tova(8, every=4))


@pytest.mark.parametrize(("spec", "said"), [("budget=0", "a row")])
def test_bad_settings_are_refused(spec: str, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        build_cache_policy(f"tova:{spec}")
