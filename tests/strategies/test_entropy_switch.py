"""Two models in turn: who writes is worked out by plain loops over the models' rows, and so is the
law of what they write.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.spec import resolve_method
from foretell.strategies import entropy_switch
from foretell.strategies.entropy_switch import EntropySwitch, row_entropy
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws

PROMPT = [1, 0, 1]
SAMPLING = Sampling(temperature=0.8, max_new_tokens=40)


def pair(vocab: int = 3, seed: int = 3, copy: float = 1.5) -> dict[str, Model]:
    """Models of which either is at times surer than the other."""
    small = Toy(vocab, seed + 1, copy=copy, sharpness=5.0, name="draft")
    return {"target": Toy(vocab, seed, copy=copy), "draft": small}


def bits(row: Sequence[float]) -> float:
    weights = [math.exp(x - max(row)) for x in row]
    chances = [weight / sum(weights) for weight in weights]
    return -sum(p * math.log2(p) for p in chances if p > 0)


def writers(
    config: EntropySwitch, models: dict[str, Model], prompt: Sequence[int], output: Sequence[int]
) -> list[str]:
    """Who writes each token of the output, and the one after it."""
    names = ["draft" if config.tau > 0 else "target"]
    seen: list[float] = []
    changed = 0
    for place in range(len(output)):
        model = models[names[-1]]
        assert isinstance(model, Toy)
        seen.append(bits(laws.row(model, [*prompt, *output[:place]])))
        last = seen[-config.window :]
        name = "draft" if sum(last) / len(last) < config.tau else "target"
        if name == names[-1] or place + 1 - changed < config.dwell:
            names.append(names[-1])
        else:
            names.append(name)
            changed = place + 1
    return names


def run(
    config: EntropySwitch | Plain, sampling: Sampling, models: dict[str, Model]
) -> tuple[list[int], list[str], dict[str, int]]:
    """(tokens, who wrote each, forwards of each model)."""
    engine = Engine(models)
    live = engine.add(Request(PROMPT, config, sampling))
    sources = [source for event in engine.run() for source in event.sources]
    assert live.error is None, live.error
    stats = live.ctx.stats
    assert stats.drafted == stats.accepted == sources.count("draft")
    return live.ctx.output, sources, stats.calls


@pytest.mark.parametrize("setting", ["plain", "top-p", "penalties", "end"])
def test_the_law_is_that_of_the_model_whose_turn_it_is(setting: str) -> None:
    config = EntropySwitch(tau=1.1, window=2, dwell=1)
    models = pair(seed=8)
    base = laws.SETTINGS[setting]
    asked = replace(base, sampling=replace(base.sampling, max_new_tokens=4))
    law = laws.enumerate_law(config, laws.PROMPT, asked, models, warm=False)
    turns: Counter[str] = Counter()

    def rows(output: Sequence[int]) -> list[float]:
        name = writers(config, models, laws.PROMPT, output)[-1]
        turns[name] += 1
        model = models[name]
        assert isinstance(model, Toy)
        return laws.row(model, [*laws.PROMPT, *output])

    toy = models["target"]
    assert isinstance(toy, Toy)
    assert law.distance(laws.reference(toy, laws.PROMPT, asked, rows)) < 1e-9
    assert min(turns["draft"], turns["target"]) > 2, turns


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_at_its_limits_one_model_writes_everything(temperature: float) -> None:
    for seed in range(3):
        sampling = replace(SAMPLING, temperature=temperature, seed=seed)
        models = pair(8, seed)
        for tau, name in ((math.inf, "draft"), (-math.inf, "target")):
            tokens, sources, calls = run(EntropySwitch(tau), sampling, models)
            want, _, forwards = run(Plain(), sampling, {"target": models[name]})
            assert tokens == want and sources == [name] * len(want)
            assert calls == {name: forwards["target"]}
    assert resolve_method("entropy-switch:tau=-inf")[1] == EntropySwitch(-math.inf)


@pytest.mark.parametrize(("tau", "window", "dwell"), [(1.9, 5, 10), (2.0, 1, 3), (2.1, 3, 1)])
def test_who_wrote_what_is_told_and_no_change_comes_too_soon(
    tau: float, window: int, dwell: int
) -> None:
    config = EntropySwitch(tau, window, dwell)
    changes = 0
    for seed in range(6):
        models = pair(8, seed, copy=1.0)
        tokens, sources, calls = run(config, replace(SAMPLING, seed=seed), models)
        assert sources == writers(config, models, PROMPT, tokens)[:-1]
        counts = Counter(sources)
        assert sum(counts.values()) == len(tokens) == SAMPLING.max_new_tokens
        assert calls == counts, "a forward of the active model a token, and no other"
        places = [i for i, (a, b) in enumerate(pairwise(sources), 1) if a != b]
        assert all(b - a >= dwell for a, b in pairwise([0, *places]))
        changes += len(places)
    assert changes > 3


def test_caches_are_those_of_a_fresh_prefill_and_batches_change_nothing() -> None:
    config = EntropySwitch(tau=1.2, window=2, dwell=2)
    for temperature in (0.0, 1.0):
        laws.check_close(config, temperature, tokens=7)
    laws.check_batch([config, Plain()])
    laws.check_ends(config, 1.0)


def test_texts_that_the_small_model_cannot_read_are_the_large_ones() -> None:
    models = pair(8)
    models["draft"] = Toy(8, 5, context=12, name="draft")
    tokens, sources, _ = run(EntropySwitch(math.inf), SAMPLING, models)
    assert sources == ["draft"] * 10 + ["target"] * 30 and len(tokens) == 40
    models["draft"] = Toy(4, 5, name="draft")
    for seed in range(5):
        config = EntropySwitch(1.5, 1, 1)
        tokens, sources, _ = run(config, replace(SAMPLING, seed=seed), models)
        first = next(i for i, token in enumerate(tokens) if token >= 4)
        assert sources[first + 1 :] == ["target"] * (39 - first)
        assert "draft" in sources[: first + 1]


def test_entropy_is_in_bits_and_of_the_bare_row() -> None:
    for vocab in (2, 8, 1024):
        assert row_entropy(torch.zeros(vocab)) == pytest.approx(math.log2(vocab))
    assert row_entropy(torch.tensor([3.0, -torch.inf, -torch.inf])) == 0.0
    assert row_entropy(torch.tensor([1.0, 1.0, -torch.inf])) == pytest.approx(1.0)


def test_slips_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nats for bits, and entropies of warped rows."""
    check = test_the_law_is_that_of_the_model_whose_turn_it_is
    for slip in (
        lambda row: row_entropy(row) * math.log(2),
        lambda row: row_entropy(row / 0.4),
        lambda row: row_entropy(row - 2.0 * torch.arange(len(row))),
    ):
        monkeypatch.setattr(entropy_switch, "row_entropy", slip)
        with pytest.raises(AssertionError):
            check("plain")


def test_what_it_lacks_and_bad_values_are_told_in_a_line() -> None:
    with pytest.raises(Unsupported, match="needs a 'draft' model"):
        Engine({"target": Toy(4)}).add(Request(PROMPT, EntropySwitch()))
    for name, value in (("tau", math.nan), ("window", 0), ("dwell", 0)):
        with pytest.raises(BadConfig, match=rf"entropy-switch:{name}={value}: must be"):
            EntropySwitch(**{name: value})  # type: ignore[arg-type]
