"""Exploring: what is committed, and how many rounds there must be."""

from __future__ import annotations

import math

import pytest

from foretell.core.masked_text import Sheet
from foretell.errors import BadConfig
from foretell.testing.toy_canvas import Oracle, ToyCanvas
from tests.diffusion.worlds import calls, filled, text


def test_without_exploring_it_is_threshold() -> None:
    for seed in range(6):
        model = ToyCanvas(seed=seed)
        options = {"max_new_tokens": 9, "temperature": 0.7 * (seed % 2), "seed": seed}
        (ours,) = filled(model, "ete:values=1,ahead=0,tau=0.6,block=4", **options)
        (base,) = filled(model, "threshold:tau=0.6,block=4", **options)
        assert ours.ctx.output == base.ctx.output and calls(ours) == calls(base)


# Once the first token is known all the others are.
CHAINED = {(0, 1, 2, 3, 0, 1): 0.4, (1, 2, 3, 0, 1, 2): 0.35, (2, 3, 0, 1, 2, 3): 0.25}


@pytest.mark.parametrize("explore", ["branch", "commit"])
def test_a_token_that_settles_the_others_is_decided_first(explore: str) -> None:
    model = Oracle(CHAINED, vocab=5)
    (live,) = filled(model, f"ete:explore={explore}", max_new_tokens=6)
    assert tuple(live.ctx.output) in CHAINED and calls(live) == 2


def test_rounds_never_go_below_what_information_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """T >= I / max b, b the information that a round commits."""
    sheets: list[Sheet] = []
    commit = Sheet.commit

    def noted(self: Sheet, place: int, token: int, chance: float) -> None:
        if all(one is not self for one in sheets):
            sheets.append(self)
        commit(self, place, token, chance)

    monkeypatch.setattr(Sheet, "commit", noted)
    for method in ("ete:block=4", "threshold:tau=0.5,block=4", "freedave:block=4"):
        for seed in range(4):
            sheets.clear()
            filled(ToyCanvas(seed=seed), method, max_new_tokens=12)
            done = max(sheets, key=lambda sheet: (len(sheet.known), sheet.rounds))
            of_round: dict[int, float] = {}
            for at, chance in done.known.values():
                of_round[at] = of_round.get(at, 0) - math.log(chance)
            total = sum(of_round.values())
            assert done.rounds >= total / max(of_round.values()) - 1e-9


def test_it_needs_fewer_rounds_than_threshold() -> None:
    rounds: dict[str, int] = {"ete": 0, "threshold": 0}
    for seed in range(6):
        texts = {tuple((i + seed + k * k) % 4 for k in range(8)): 0.25 for i in range(4)}
        model = Oracle(texts, vocab=5)
        for method in rounds:
            (live,) = filled(model, method, max_new_tokens=8, temperature=1.0, seed=seed)
            rounds[method] += calls(live)
    assert rounds["ete"] <= rounds["threshold"]


def test_a_cache_of_one_block_allows_none_ahead() -> None:
    with pytest.raises(BadConfig, match="ahead=0"):
        text(ToyCanvas(), "ete", kv="dual")


def test_what_is_explored_is_what_sampling_leaves() -> None:
    """With one value left there is nothing to choose."""
    for seed in range(4):
        model, options = ToyCanvas(seed=seed), {"max_new_tokens": 8, "seed": seed}
        hot = {"temperature": 2.0, "top_k": 1, **options}
        alone = text(model, "ete:block=4,explore=commit", **options)
        assert text(model, "ete:block=4", **hot) == alone
        banned = text(model, "ete:block=4", logit_bias={1: -90.0, 3: -90.0}, **options)
        assert not {1, 3} & {*banned}
        assert {1, 3} & {*text(model, "ete:block=4", **options)}
