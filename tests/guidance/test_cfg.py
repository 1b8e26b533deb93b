"""Guidance: the mixed law, whatever drafts; off, the target's own rows; what cannot be mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, PromptTooLong, Unsupported
from foretell.guidance.cfg import Cfg
from foretell.strategies.plain import Plain
from foretell.strategies.samples.first_finish import FirstFinish
from foretell.testing.toy import Toy
from tests import laws, tiny
from tests.engine.users import log_softmax, mixed
from tests.guidance.driving import check_batch, check_drafts, check_off, keep_plausible


@dataclass(frozen=True)
class Looped(Cfg):
    """With its rows worked out by plain loops."""

    def rows(self, models: Mapping[str, Model], prompt: Sequence[int]) -> laws.Rows:
        toy, other = models["target"], models[self.model or "target"]
        assert isinstance(toy, Toy) and isinstance(other, Toy)
        before = self.negative or (tuple(prompt) if self.model else tuple(prompt[-1:]))

        def after(output: Sequence[int]) -> list[float]:
            c = laws.row(toy, [*prompt, *output])
            row = mixed(c, laws.row(other, [*before, *output]), self.g)
            return keep_plausible(row, log_softmax(c), self.least)

        return after


KINDS = [
    Looped(),
    Looped(g=3.0, negative=(1, 1)),
    Looped(g=0.4, model="amateur", least=0.2),
    Looped(g=2.0, model="amateur", negative=(2,)),
]


CASES = [("plain", "penalties"), ("suffix", "form"), ("draft:length=2", "plain")]


@pytest.mark.parametrize(("spec", "setting"), CASES)
@pytest.mark.parametrize("source", KINDS, ids=str)
def test_the_law_is_the_mixed_one(source: Looped, spec: str, setting: str) -> None:
    laws.check_law(laws.build(spec), setting, 2, drafts=False, source=source, sharpness=2.0)


@dataclass(frozen=True)
class Weaker(Looped):
    """A slip: what it says of its rows is true of another g."""

    def rows(self, models: Mapping[str, Model], prompt: Sequence[int]) -> laws.Rows:
        return Looped(g=self.g + 1e-4, negative=self.negative).rows(models, prompt)


def test_a_law_that_is_nearly_right_is_caught() -> None:
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(laws.build("ngram"), source=Weaker(negative=(1, 1)))


@pytest.mark.parametrize("spec", ["suffix", "ngram", "draft:length=3"])
def test_drafts_change_no_token(spec: str) -> None:
    check_drafts(Cfg(g=1.3, model="amateur"), spec)
    check_drafts(Cfg(), spec, repetition_penalty=1.2, logits_processors=(laws.Grammar(),))


def test_alone_as_in_a_batch_and_closed_at_any_step() -> None:
    check_batch(Cfg(g=2.0, model="amateur", negative=(3, 1)))


@pytest.mark.parametrize("source", [Cfg(g=1), Cfg(g=1, negative=(1,)), Cfg(g=1, model="no")])
def test_off_are_the_targets_own_rows(source: Cfg) -> None:
    check_off(source)


def test_samples_side_by_side_have_quiet_branches_of_their_own() -> None:
    """Each text is followed by its own; the first to finish is what it is alone."""
    models = {"target": Toy(6, 3, copy=0.5)}
    outputs = []
    for inner in (None, "ngram"):
        strategy = FirstFinish(3, None if inner is None else laws.build(inner).drafter)  # type: ignore[attr-defined]
        engine = Engine(models, (2,))
        sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=5)
        live = engine.add(Request([1, 2, 3], strategy, sampling, source=Cfg(g=1.4)))
        laws.finish(engine, live)
        outputs.append(live.ctx.output)
    assert outputs[0] == outputs[1]


BAD = [
    ({"g": -1.0}, "cfg:g=-1.0"),
    ({"g": float("nan")}, "cfg:g=nan"),
    ({"least": 2.0}, "cfg:least"),
    ({"model": "target"}, "leave model out"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        Cfg(**fields)


def add(models: Mapping[str, Model], source: Cfg, prompt: Sequence[int] = (1, 2)) -> Any:
    engine = Engine(models)
    live = engine.add(Request(prompt, Plain(), Sampling(max_new_tokens=6), source=source))
    list(engine.run())
    assert not live.caches
    return live.error


def test_models_that_cannot_be_mixed_are_refused_in_one_line() -> None:
    source = Cfg(model="other")
    with pytest.raises(Unsupported, match=r"cfg cannot run on toy: .*a 'other' model; load"):
        add({"target": Toy(8)}, source)
    stranger = Toy(8)
    stranger.tokenizer = tiny.tokenizer()
    target = Toy(8)
    with pytest.raises(Unsupported, match=r"one vocabulary.*give a model with the target's"):
        add({"target": target, "other": stranger}, source)
    assert not target.calls
    error = add({"target": Toy(8), "other": Toy(8, context=7)}, source)
    assert isinstance(error, PromptTooLong) and "8 tokens long" in str(error)
    error = add({"target": Toy(8), "other": Toy(4)}, source, (1, 6))
    assert isinstance(error, Unsupported) and "vocabulary has 4" in str(error)


@pytest.mark.parametrize("negative", [(1, 8), (-1,)])
def test_another_prompt_is_of_the_vocabulary(negative: tuple[int, ...]) -> None:
    target = Toy(8)
    error = add({"target": target}, Cfg(negative=negative))
    assert isinstance(error, BadConfig) and "ids of the vocabulary, 0 to 7" in str(error)
    small = {"target": Toy(16), "other": Toy(8)}
    error = add(small, Cfg(model="other", negative=(8,)))
    assert "cfg:negative=8: must be ids of the vocabulary, 0 to 7" in str(error)


def test_tokens_that_one_model_lacks_are_impossible() -> None:
    """A relative's vocabulary may be padded to another size."""
    for width in (5, 11):
        engine = Engine({"target": Toy(8, 1), "other": Toy(width, 1, noise=0.5)})
        sampling = Sampling(max_new_tokens=30, temperature=2.0)
        live = engine.add(Request([1, 2], Plain(), sampling, source=Cfg(model="other")))
        laws.finish(engine, live)
        assert max(live.ctx.output) < min(8, width) and len(live.ctx.output) == 30


def test_another_prompt_has_to_fit() -> None:
    error = add({"target": Toy(8, context=12)}, Cfg(negative=(1,) * 7))
    assert isinstance(error, PromptTooLong) and "cfg: its prompt of 7 tokens" in str(error)
    assert add({"target": Toy(8, context=12)}, Cfg(negative=(1,) * 6)) is None
    engine = Engine({"target": Toy(8)})
    live = engine.add(Request([1], Plain(), source=Cfg(), inputs={"source": (1,)}))
    list(engine.run())
    assert isinstance(live.error, Unsupported) and "this request has source" in str(live.error)
