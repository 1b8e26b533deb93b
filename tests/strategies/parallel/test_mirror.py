"""Drafts prepared for likely corrections: when they are used, and that they change nothing; the law
of the output is in test_laws.py too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.model import Model
from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.tree import Law
from foretell.core.types import Sampling
from foretell.drafters.model import chains
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.strategies.parallel import mirror
from foretell.strategies.parallel.mirror import Mirror
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from tests import laws, tiny
from tests.engine.users import Guidance

SPECS = ["mirror:kappa=1"]
PROMPT = [1, 2, 3, 1, 2]
TWO: Any = {"vocab": 2, "prompt": (0, 1, 0), "warm": False}  # few outcomes, so deep laws


def models(noise: float = 0.6, vocab: int = 8) -> dict[str, Model]:
    target = ToyLayers(vocab, 3, copy=1.5)
    return {"target": target, "draft": Toy(vocab, 3, noise=noise, copy=1.5, name="draft")}


def run(method: Any, count: int, made: Any = None, **options: Any) -> Live:
    sampling = Sampling(max_new_tokens=count, **options)
    return laws.generate(method, PROMPT, laws.Setting(sampling), made or models())


# --- how often what was prepared is used


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_every_token_continued_nothing_is_drafted_in_the_open(temperature: float) -> None:
    live = run(Mirror(3, 8), 60, temperature=temperature)
    rounds = live.ctx.stats.calls["layers"]
    assert live.ctx.stats.calls["target"] == rounds > 12
    assert live.ctx.stats.calls["draft"] <= 3 + 3 * rounds, "a window was drafted again"


def test_more_guesses_make_more_of_the_windows() -> None:
    open_windows = []
    for kappa in (0, 1, 3, 8):
        with pytest.MonkeyPatch.context() as patch:
            count = count_windows(patch)
            run(Mirror(3, kappa), 40, models(1.2), temperature=1.0)
            open_windows.append(count[0])
    assert open_windows == sorted(open_windows, reverse=True)
    assert open_windows[0] > open_windows[2] > open_windows[-1] == 1, open_windows


def count_windows(patch: pytest.MonkeyPatch) -> list[int]:
    count = [0]
    draft = Mirror.draft_window

    def counted(self: Mirror, *args: Any) -> Any:
        count[0] += 1
        return draft(self, *args)

    patch.setattr(Mirror, "draft_window", counted)
    return count


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_guesses_it_is_ordinary_speculation_call_by_call(temperature: float) -> None:
    for seed in range(6):
        options = {"temperature": temperature, "seed": seed}
        live = run(Mirror(3, 0), 30, **options)
        usual = run(laws.build("draft:length=3", nodes=8), 30, **options)
        assert live.ctx.output == usual.ctx.output
        assert live.ctx.stats.calls == usual.ctx.stats.calls
        assert live.ctx.stats.steps == usual.ctx.stats.steps


def test_hit_or_miss_changes_no_greedy_token() -> None:
    plain = run(Plain(), 50)
    for gamma, kappa in ((1, 1), (3, 1), (3, 2), (5, 8)):
        live = run(Mirror(gamma, kappa), 50)
        assert live.ctx.output == plain.ctx.output
        # A forward in two parts is one step, which the numbers of a step are counted by.
        assert live.ctx.stats.steps == live.ctx.stats.calls["target"] - 1


# --- the law, and what it must catch


@pytest.mark.parametrize(("gamma", "kappa"), [(1, 1), (2, 1), (2, 2)])
def test_the_law_of_three_tokens(gamma: int, kappa: int) -> None:
    laws.check_law(Mirror(gamma, kappa), "plain", tokens=3, **TWO)


def check() -> None:
    laws.check_law(Mirror(2, 2), "plain", tokens=3, **TWO)


def test_slips_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # the laws of a branch are not carried with it
        patch.setattr(mirror, "chain_below", without_laws)
        with pytest.raises(AssertionError, match="off by"):
            check()
    with monkeypatch.context() as patch:  # a branch is used whatever the correction is
        patch.setattr(mirror, "find_prepared_node", any_branch)
        with pytest.raises(AssertionError, match="a tree hangs below"):
            run(Mirror(3, 2, exit=1), 60, temperature=1.0)
    with monkeypatch.context() as patch:  # all branches draw with the keys of the window
        patch.setattr(mirror, "continue_chains", same_keys)
        with pytest.raises(AssertionError, match="used twice"):
            check()


def without_laws(tree: Any, node: int) -> Any:
    chain = chains.chain_below(tree, node)
    even = Law(torch.full((2,), 0.5, dtype=torch.float64))
    if node:
        chain.laws = [None, *[even] * (len(chain) - 1)]
    return chain


def any_branch(window: Any, branches: Any, outcome: Any) -> int | None:
    slot = outcome.path[-1] if outcome.path else 0
    guessed = [node for node in branches.tries[slot] if node >= len(window)]
    return guessed[0] if guessed else None


def same_keys(*args: Any, draw_count: int = 0, **more: Any) -> Any:
    return chains.continue_chains(*args, draw_count=0, **more)


def test_the_early_guess_decides_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a wrong one only costs time."""
    plain = run(Plain(), 60)

    def wrong(self: Mirror, ctx: Any, window: Any, rows: torch.Tensor) -> dict[int, list[int]]:
        worst = rows.argmin(-1).tolist()
        return {
            slot: [token]
            for slot, token in enumerate(worst)
            if window.find_child(slot, token) < 0 and not ctx.ends(window, slot)
        }

    monkeypatch.setattr(Mirror, "guess_tokens", wrong)
    assert run(Mirror(3, 1), 60).ctx.output == plain.ctx.output


def test_no_two_decisions_share_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[tuple[str, int, int]] = []
    uniform = Rng.uniform

    def noted(self: Rng, purpose: str, position: int, index: int = 0) -> float:
        keys.append((purpose, position, index))
        return uniform(self, purpose, position, index)

    monkeypatch.setattr(Rng, "uniform", noted)
    run(Mirror(3, 2), 40, temperature=1.0)
    assert len(keys) == len(set(keys)) > 150


# --- a transformer, whose layers really run in two parts


def test_a_transformer_in_two_parts_writes_plain_tokens() -> None:
    llama = tiny.llama(num_hidden_layers=4)
    made: dict[str, Model] = {
        "target": Decoder(llama, "tiny", fused_blocks),
        "draft": Decoder(tiny.relative(llama), "draft", fused_blocks),
    }
    prompt = [5, 9, 13, 5, 9]
    setting = laws.Setting(Sampling(max_new_tokens=24))
    plain = laws.generate(Plain(), prompt, setting, made)
    for exit_layer in (1, 3):
        live = laws.generate(Mirror(3, 2, exit_layer), prompt, setting, made)
        assert live.ctx.output == plain.ctx.output and live.ctx.stats.accepted


def test_long_prompts_in_pieces_beside_parts_of_forwards() -> None:
    """Pieces of a text run all layers, so they share no forward with the first ones alone."""
    made = models()
    engine = Engine(made)
    texts = [[(7 * i + j) % 8 for i in range(300 * j + 5)] for j in range(3)]
    lives = [engine.add(Request(text, Mirror(3, 2), Sampling(max_new_tokens=12))) for text in texts]
    laws.finish(engine, *lives)
    for text, live in zip(texts, lives, strict=True):
        setting = laws.Setting(Sampling(max_new_tokens=12))
        assert live.ctx.output == laws.generate(Plain(), text, setting, made).ctx.output


def test_a_request_may_have_to_make_room_between_any_two_forwards() -> None:
    engine = Engine(models())
    live = engine.add(Request(PROMPT, Mirror(3, 2), Sampling(max_new_tokens=30)))
    while engine.live:
        engine.step()
        if engine.live:
            assert engine.preempt_request(live)
    assert live.ctx.output == run(Plain(), 30).ctx.output


# --- what is refused


def test_what_it_cannot_do_is_told_by_name() -> None:
    with pytest.raises(BadConfig, match="mirror:exit=4: must be between 1 and 3 here"):
        run(Mirror(exit=4), 5)
    engine = Engine(models())
    with pytest.raises(BadConfig, match="rows from a source"):
        engine.add(Request(PROMPT, Mirror(), Sampling(), source=Guidance()))
    chains = models()
    chains["draft"].caps = chains["draft"].caps - {"tree"}
    with pytest.raises(Unsupported, match="branching trees"):
        run(Mirror(), 5, chains)
    assert run(Mirror(kappa=0), 5, chains).ctx.output == run(Plain(), 5).ctx.output
