"""Plain decoding is what all else is measured by, so it is compared with a loop that has no
engine.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretell.core.random import Rng
from foretell.core.types import Sampling
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws


def test_greedy_tokens_are_the_best_of_each_row() -> None:
    for seed, setting in enumerate([*laws.GREEDY, *laws.GREEDY]):
        toy, prompt = Toy(16, seed, copy=1.5), [seed, 3, 1]
        output: list[int] = []
        while not laws.ended(output, setting):
            law = laws.expected_law(toy, prompt, output, setting)
            output.append(law.index(1.0))
        assert laws.generate(Plain(), prompt, setting, {"target": toy}).ctx.output == output


@pytest.mark.parametrize("name", laws.SETTINGS)
def test_sampled_tokens_are_drawn_from_the_law_of_the_path_by_the_position_alone(name: str) -> None:
    for seed in range(5):
        base = laws.SETTINGS[name]
        setting = replace(base, sampling=replace(base.sampling, seed=seed, max_new_tokens=9))
        toy, output = Toy(base.vocab or 4, seed), []
        while not laws.ended(output, setting):
            law = torch.tensor(laws.expected_law(toy, [1, 2], output, setting), dtype=torch.float64)
            output.append(Rng(seed).sample(law, "target", len(output)))
        assert laws.generate(Plain(), [1, 2], setting, {"target": toy}).ctx.output == output


def test_one_forward_a_token() -> None:
    live = laws.generate(
        Plain(), [1, 2, 3], laws.Setting(Sampling(max_new_tokens=7)), {"target": Toy(4)}
    )
    assert (
        live.ctx.stats.calls == {"target": 7}
        and live.ctx.stats.mat == 1.0
        and live.ctx.stats.drafted == 0
    )
