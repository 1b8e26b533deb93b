"""SnapKV against loops over transformers' own attention to the prompt."""

from __future__ import annotations

import pytest
import torch

from foretell.errors import BadConfig
from foretell.kv.evict.snapkv import Snapkv
from tests.kv.policies import PROMPT
from tests.kv.twin import Rows, Twin, by_engine, by_loops, grouped, same

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "snapkv:budget=10,window=3,kernel=3"

TOKENS = 12


class Loops(Twin):
    """`slip` names a mistake."""

    def __init__(self, kv: Snapkv, slip: str = "") -> None:
        self.kv, self.slip = kv, slip

    def change(self, length: int, prompt: int, rows: Rows, weights: list[torch.Tensor]) -> None:
        if length != prompt or prompt <= self.kv.budget:
            return
        for layer, pair in enumerate(rows):
            heads = len(pair[0])
            window = 1 if self.slip == "last alone" else self.kv.window
            votes = grouped(weights[layer], heads)[:, prompt - window :].sum(1).tolist()
            older = prompt - self.kv.window
            half = 0 if self.slip == "unsmoothed" else self.kv.kernel // 2
            stays = []
            for head in range(heads):
                smooth = []
                for row in range(older):
                    near = votes[head][max(0, row - half) : min(older, row + half + 1)]
                    smooth.append(max(near) if self.kv.pool == "max" else sum(near))
                order = sorted(range(older), key=lambda row: (smooth[row], row))
                chosen = sorted(order[-(self.kv.budget - self.kv.window) :])
                stays.append(chosen + list(range(older, prompt)))
            for part in (0, 1):
                old = pair[part]
                pair[part] = torch.stack([old[h, stays[h]] for h in range(heads)])


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_it_keeps_the_rows_that_loops_keep(pool: str, kernel: int) -> None:
    kv = Snapkv(10, window=4, kernel=kernel, pool=pool)
    output, held = by_engine(kv, PROMPT, TOKENS)
    assert same(held, by_loops(Loops(kv), PROMPT, output))


@pytest.mark.parametrize("slip", ["last alone", "unsmoothed"])
def test_a_slip_is_noticed(slip: str) -> None:
    kv = Snapkv(10, window=4, kernel=3)
    output, held = by_engine(kv, PROMPT, TOKENS)
    assert not same(held, by_loops(Loops(kv, slip), PROMPT, output))


def test_the_window_stays_and_so_does_what_follows() -> None:
    kv = Snapkv(10, window=4, kernel=3)
    _, held = by_engine(kv, PROMPT, TOKENS)
    _, whole = by_engine(None, PROMPT, 2)
    for length, rows in held.items():
        for ours, full in zip(rows, whole[len(PROMPT)], strict=True):
            for mine, all_rows in zip(ours, full, strict=True):
                assert mine.shape[1] == 10 + length - len(PROMPT)
                assert torch.allclose(mine[:, 6:10], all_rows[:, len(PROMPT) - 4 :], atol=1e-9)


@pytest.mark.parametrize("length", [4, 10])
def test_a_prompt_not_longer_than_the_budget_is_untouched(length: int) -> None:
    output, held = by_engine(Snapkv(10, window=4), PROMPT[:length], TOKENS)
    want, whole = by_engine(None, PROMPT[:length], TOKENS)
    assert output == want and held.keys() == whole.keys()
    for at, rows in held.items():
        for ours, full in zip(rows, whole[at], strict=True):
            assert all(map(torch.equal, ours, full))


@pytest.mark.parametrize(("name", "value"), [("budget", 32)])
def test_bad_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(BadConfig, match=f"snapkv:{name}"):
        Snapkv(**{name: value})  # type: ignore[arg-type]
