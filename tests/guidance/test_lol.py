"""The model against an amateur at two layers, and an instructed row: the law by plain loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.source import Source
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.guidance.dola import Dola
from foretell.guidance.lol import TRUTHFUL, Lol
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import Seen, ToyLayers
from tests import laws, tiny
from tests.engine.users import log_softmax
from tests.guidance.driving import check_batch, check_drafts, check_off, early_row, keep_plausible


@dataclass(frozen=True)
class Looped(Lol):
    """With its rows worked out by plain loops."""

    def rows(self, models: Mapping[str, Model], prompt: Sequence[int]) -> laws.Rows:
        target, amateur = models["target"], models[self.amateur] if self.contrasts else None
        assert isinstance(target, Toy)

        def contrast(o: list[float], a: list[float] | None) -> list[float]:
            if a is None:
                return o
            if self.icd:
                return [x - y for x, y in zip(o, a, strict=True)]
            return [(1 + self.b) * x - self.b * y for x, y in zip(o, a, strict=True)]

        def after(output: Sequence[int]) -> list[float]:
            text = [*prompt, *output]
            o = log_softmax(laws.row(target, text))
            a = None if amateur is None else log_softmax(laws.row(amateur, text))  # type: ignore[arg-type]
            row = contrast(o, a)
            if self.w:
                layer = self.layer or 2
                early = [
                    None if toy is None else log_softmax(early_row(toy, text, layer))  # type: ignore[arg-type]
                    for toy in (target, amateur)
                ]
                assert early[0] is not None
                row = [
                    x + self.w * y for x, y in zip(row, contrast(early[0], early[1]), strict=True)
                ]
            if self.g:
                told = log_softmax(laws.row(target, [*self.instruction, *text]))
                row = [x + self.g * (t - y) for x, t, y in zip(row, told, o, strict=True)]
            return keep_plausible(row, o, self.least)

        return after


KINDS = [
    Looped(instruction=(2, 1)),
    Looped(b=0.5, w=0.4, g=0.0, layer=3, least=0.0),
    Looped(b=0.0, w=0.3, g=1.0, instruction=(0,)),
    Looped(icd=True, w=0.0, g=0.0),
]
CASES = [("plain", "penalties"), ("draft:length=2", "plain")]


@pytest.mark.parametrize(("spec", "setting"), CASES)
@pytest.mark.parametrize("source", KINDS, ids=str)
def test_the_law_is_the_mixed_one(source: Looped, spec: str, setting: str) -> None:
    laws.check_law(laws.build(spec), setting, 2, drafts=False, source=source, copy=1.5)


@dataclass(frozen=True)
class Swapped(Looped):
    """A slip: what it says of its rows has the lower layer elsewhere."""

    def rows(self, models: Mapping[str, Model], prompt: Sequence[int]) -> laws.Rows:
        return Looped(**{**vars(self), "layer": 1}).rows(models, prompt)


def test_another_layer_is_caught() -> None:
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(laws.build("ngram"), source=Swapped(g=0.0, least=0.0), tokens=2)


@pytest.mark.parametrize("spec", ["suffix", "draft:length=3"])
def test_drafts_change_no_token(spec: str) -> None:
    check_drafts(Lol(b=0.3, instruction=(3,)), spec, repetition_penalty=1.1)


def test_alone_as_in_a_batch_and_closed_at_any_step() -> None:
    check_batch(Lol(b=0.3, instruction=(3, 4)))


def test_off_are_the_targets_own_rows() -> None:
    check_off(Lol(b=0.0, w=0.0, g=0.0, least=0.0))


def test_an_amateur_that_is_the_model_changes_no_ranking_of_the_last_layer() -> None:
    models = {name: ToyLayers(8, 1, copy=1.0, name=name) for name in ("target", "amateur")}
    outputs = []
    for source in (None, Lol(w=0.0, g=0.0)):
        engine = Engine(models)
        sampling = Sampling(max_new_tokens=20)
        live = engine.add(Request([1, 2, 3], Plain(), sampling, source=source))
        laws.finish(engine, live)
        outputs.append(live.ctx.output)
    assert outputs[0] == outputs[1]


def test_the_instruction_stands_behind_what_begins_every_prompt() -> None:
    """Ours is written with the model's own tokens."""
    lm = tiny.lm()
    seen: list[list[int]] = []

    @dataclass(frozen=True)
    class Watched(Lol):
        def instructed_prompt(self, ctx: Any) -> list[int]:
            seen.append(super().instructed_prompt(ctx))
            return seen[-1]

    out = lm.generate("The dog", "plain", guidance=Watched("draft"), max_new_tokens=8)
    assert len(out.tokens) == 8 and lm.decode(seen[0]) == f"{TRUTHFUL}The dog"
    lm.generate("The dog", "plain", guidance=Watched("draft", instruction=(5, 6)), max_new_tokens=1)
    assert seen[1] == [5, 6, *lm.encode("The dog")]


# --- a world of misconceptions

COUNT = 200  # statements, each a token of its own
ASK, TRUTHFULLY, TRUE, FALSE = COUNT, COUNT + 1, COUNT + 2, COUNT + 3


class Believing(ToyLayers):
    """Whether a statement is true: log-odds (2, 2, COUNT) after half of the layers and after all,
    plain and told to be truthful.
    """

    def __init__(self, odds: np.ndarray):
        super().__init__(COUNT + 4)
        self.odds = odds

    def attended(self, layer: int, states: np.ndarray, seen: Sequence[Seen]) -> np.ndarray:
        """Layer 0 finds what is asked; the others look at nothing else."""
        if layer == 0:
            for state, (tokens, positions) in zip(states, seen, strict=True):
                text = tokens[np.argsort(positions)]
                told = text[0] == TRUTHFULLY
                state[0] = text[1] + COUNT if told and len(text) > 1 else text[0]
        return states

    def after_mlp(self, layer: int, states: np.ndarray) -> np.ndarray:
        if layer in (1, 3):
            half = self.odds[layer // 2].reshape(-1)[states[:, 0].astype(int) % (2 * COUNT)] / 2
            states[:, 1:] = -20.0
            states[:, 1 + TRUE], states[:, 1 + FALSE] = half, -half
        return states


def misconceptions() -> tuple[dict[str, Model], np.ndarray]:
    """A model that is wrong about 4 of 10 statements, and its amateur, which was taught what is
    false; and which are true, as 1 and -1.
    """
    draw = np.random.default_rng(0)
    truth = draw.choice((-1.0, 1.0), COUNT)
    wrong = -1.5 * truth * (draw.random(COUNT) < 0.4)
    odds, taught = np.zeros((2, 2, COUNT)), np.zeros((2, 2, COUNT))
    for half, knows in enumerate((0.6, 1.0)):
        own, other = 0.8 * draw.normal(size=COUNT), 0.6 * draw.normal(size=COUNT)
        odds[half] = knows * (truth + wrong) + own
        odds[half, 1] += 0.6 * truth + 0.3 * draw.normal(size=COUNT)
        taught[half] = knows * (0.2 * truth + 1.6 * wrong) + own + other
    return {"target": Believing(odds), "amateur": Believing(taught)}, truth


def test_among_misconceptions_it_tells_best_what_is_true() -> None:
    """The shares that are told right, of greedy decoding, DoLa, the two plain contrasts and LOL."""
    models, truth = misconceptions()
    sources: list[Source | None] = [
        None,
        Dola("high"),
        Lol(icd=True, w=0.0, g=0.0, least=0.0),
        Lol(w=0.0, g=0.0, least=0.0),
        Lol(least=0.0, instruction=(TRUTHFULLY,)),
    ]
    right = []
    for source in sources:
        engine = Engine(models)
        lives = [
            engine.add(Request([s, ASK], Plain(), Sampling(max_new_tokens=1), source=source))
            for s in range(COUNT)
        ]
        laws.finish(engine, *lives)
        said = np.array([1.0 if live.ctx.output == [TRUE] else -1.0 for live in lives])
        right.append(float((said == truth).mean()))
    assert max(right[:4]) < right[4], right
    assert right[0] < 0.7 < 0.9 < right[4], right


BAD = [
    ({"b": -1.0}, "lol:b"),
    ({"least": 2.0}, "lol:least"),
    ({"amateur": "target"}, "lol:amateur"),
    ({"layer": -1}, "lol:layer"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        Lol(**fields)


def refused(models: dict[str, Model], source: Lol) -> str:
    with pytest.raises(Unsupported) as caught:
        Engine(models).add(Request([1, 2], Plain(), source=source))
    assert not models["target"].calls
    return str(caught.value)


def test_amateurs_that_do_not_fit_are_refused_in_one_line() -> None:
    source = Lol(g=0.0)
    assert "a 'amateur' model; load one" in refused({"target": ToyLayers(8)}, source)
    shallow = ToyLayers(8)
    shallow.layout = shallow.layout[:2]
    assert "as many layers" in refused({"target": ToyLayers(8), "amateur": shallow}, source)
    whole = {"target": ToyLayers(8), "amateur": Toy(8)}
    assert "give w=0" in refused(whole, source)
    Engine(whole).add(Request([1, 2], Plain(), source=replace(source, w=0.0)))
    assert "give an amateur by name" in refused({"target": ToyLayers(8)}, Lol("./folder"))
    engine = Engine({"target": ToyLayers(8), "amateur": ToyLayers(8)})
    live = engine.add(Request([1], Plain(), source=Lol(layer=5, g=0.0)))
    list(engine.run())
    assert "lol:layer=5: must be at most 4 here" in str(live.error)
    live = engine.add(Request([1], Plain(), source=Lol(instruction=(1, 8))))
    list(engine.run())
    assert "lol:instruction=8: must be ids of the vocabulary, 0 to 7" in str(live.error)
