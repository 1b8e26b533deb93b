"""DapQ against loops over transformers' own attention of tokens after the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from foretell.errors import BadConfig
from foretell.kv.evict.dapq import Dapq
from foretell.models.decoder.decoder import Decoder
from tests.kv.policies import PROMPT, taken_in, target
from tests.kv.twin import Rows, Twin, by_engine, by_loops, grouped, plain_model, same
from tests.models.decoder.families import tiny

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "dapq:budget=10,pseudo=6,window=2,kernel=3"

TOKENS = 12


class Loops(Twin):
    """`slip` names a mistake."""

    def __init__(self, kv: Dapq, prompt: list[int], slip: str = "") -> None:
        self.kv, self.prompt, self.slip = kv, prompt, slip

    def pseudo(self) -> list[int]:
        first = self.kv.pseudo // 2
        last = self.prompt[-(self.kv.pseudo - first) :]
        return last + last if self.slip == "last ids alone" else self.prompt[:first] + last

    def given(self, rows: Rows) -> list[torch.Tensor]:
        """Of each layer what the pseudo tokens give (H, pseudo, rows)."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(rows):
            cache.update(keys[None].clone(), values[None].clone(), layer)
        ids = self.pseudo()
        start = len(self.prompt) - (len(ids) if self.slip == "positions of the prompt" else 0)
        with torch.inference_mode():
            answer = plain_model()(
                torch.tensor([ids]),
                past_key_values=cache,
                position_ids=torch.arange(start, start + len(ids))[None],
                output_attentions=True,
            )
        return [weights[0] for weights in answer.attentions]

    def change(self, length: int, prompt: int, rows: Rows, weights: list[torch.Tensor]) -> None:
        if length != prompt or prompt <= self.kv.budget:
            return
        for pair, given in zip(rows, self.given(rows), strict=True):
            votes = []
            for head in grouped(given, len(pair[0])):
                total = [0.0] * prompt
                for query in head.tolist():
                    whole = 1.0 if self.slip == "not divided" else sum(query[:prompt])
                    total = [a + b / whole for a, b in zip(total, query, strict=False)]
                votes.append(total)
            older, half = prompt - self.kv.window, self.kv.kernel // 2
            stays = []
            for total in votes:
                smooth = []
                for row in range(older):
                    near = total[max(0, row - half) : min(older, row + half + 1)]
                    smooth.append(max(near) if self.kv.pool == "max" else sum(near))
                order = sorted(range(older), key=lambda row: (smooth[row], row))
                chosen = sorted(order[older - (self.kv.budget - self.kv.window) :])
                stays.append(chosen + list(range(older, prompt)))
            for part in (0, 1):
                pair[part] = torch.stack([pair[part][h, kept] for h, kept in enumerate(stays)])


@pytest.mark.parametrize(
    ("pool", "kernel", "window", "pseudo"), [("mean", 1, 0, 1), ("mean", 3, 2, 7), ("max", 3, 4, 8)]
)
def test_it_keeps_the_rows_that_loops_keep(
    pool: str, kernel: int, window: int, pseudo: int
) -> None:
    kv = Dapq(10, pseudo, window, kernel, pool)
    output, held = by_engine(kv, PROMPT, TOKENS)
    assert same(held, by_loops(Loops(kv, PROMPT), PROMPT, output))


@pytest.mark.parametrize("slip", ["positions of the prompt", "last ids alone", "not divided"])
def test_a_slip_is_noticed(slip: str) -> None:
    found = []
    for kv in (Dapq(7, 8, 2, 1), Dapq(10, 6, 1, 1)):
        output, held = by_engine(kv, PROMPT, TOKENS)
        found.append(same(held, by_loops(Loops(kv, PROMPT, slip), PROMPT, output)))
    assert not all(found)


def test_what_follows_stays_and_no_row_of_a_pseudo_token() -> None:
    _, held = by_engine(Dapq(10, 6, 2, 3), PROMPT, TOKENS)
    for length, rows in held.items():
        for ours in (part for layer in rows for part in layer):
            assert ours.shape[1] == 10 + length - len(PROMPT)


@pytest.mark.parametrize("length", [4, 10])
def test_a_prompt_not_longer_than_the_budget_is_untouched(length: int) -> None:
    model = target(dtype=torch.float64)
    calls = model.calls
    want, whole = by_engine(None, PROMPT[:length], TOKENS)
    plain, calls = model.calls - calls, model.calls
    output, held = by_engine(Dapq(10, window=4), PROMPT[:length], TOKENS)
    assert model.calls - calls == plain, "nobody is asked"
    assert output == want and held.keys() == whole.keys()
    for at, rows in held.items():
        for ours, full in zip(rows, whole[at], strict=True):
            assert all(map(torch.equal, ours, full))


def test_at_the_end_of_the_context_as_many_vote_as_there_are_positions() -> None:
    model = Decoder(tiny("gpt2"), "gpt2")  # its positions are a table
    prompt = [i % 90 for i in range(model.context - 3)]
    cache: Any = taken_in(model, prompt, len(prompt))
    cache.use(Dapq(10, 6, 2, 3).build_policy(model), len(prompt))
    cache.policy.first_ids, cache.policy.last_ids = (0, 1, 2), tuple(prompt[-3:])
    cache.length = len(prompt)
    cache.policy.change_rows(cache)
    assert cache.base == 10


@pytest.mark.parametrize(("name", "value"), [("budget", 8)])
def test_bad_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(BadConfig, match=f"dapq:{name}"):
        Dapq(**{name: value})  # type: ignore[arg-type]
