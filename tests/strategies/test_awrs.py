"""Adaptive weighted rejection sampling: laws and weights by enumeration, on forms of a few letters."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest

from foretell.core.engine import Engine
from foretell.core.live import Live
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.errors import BadConfig
from foretell.families.toy import Toy
from foretell.measure.outcomes import Enumerator
from foretell.ops import rejection
from foretell.rows.cfg import Cfg
from foretell.strategies.awrs import Awrs
from foretell.strategies.plain import Plain
from tests import laws

SPECS = ["awrs:n=1", "awrs:n=3,estimator=geometric,accepts=3"]
PROMPT = (0, 1, 2, 0)
FORM = "[ab](a|b[ab])?"  # whole after one letter, two or three, and dead behind others
END = 2


def setting(tokens: int = 3, form: str = FORM, **options: Any) -> laws.Setting:
    return laws.formed(form, 3, eos=(END,), max_new_tokens=tokens, temperature=1.0, **options)


def run(config: Any, wanted: laws.Setting, door: Any = None, toy: int = 3) -> Live:
    engine = Engine({"target": Toy(3, toy, copy=0.5)}, wanted.eos)
    live = engine.add(Request(PROMPT, config, wanted.sampling, text=laws.spell, rng=door))
    list(engine.run())
    assert live.error is None, live.error
    assert not live.caches
    return live


def free(wanted: laws.Setting, toy: int = 3) -> dict[tuple[int, ...], float]:
    """The chance of each text of the form that the model alone writes, by plain loops."""
    model, found = Toy(3, toy, copy=0.5), {}
    plain = laws.Setting(Sampling(temperature=1.0), wanted.eos)

    def go(output: tuple[int, ...], chance: float) -> None:
        text = output[:-1] if output[-1:] == (END,) else output
        complete = wanted.whole(text) and not wanted.follows(text, 3)
        if output and (text != output or complete or len(output) == wanted.sampling.max_new_tokens):
            if wanted.whole(text):
                found[output] = chance
            return
        for token, p in enumerate(laws.expected_law(model, PROMPT, output, plain)):
            go((*output, token), chance * p)

    go((), 1.0)
    return found


def expected(config: Awrs, wanted: laws.Setting) -> tuple[dict[tuple[int, ...], float], int]:
    """Of each text the mean of its particles' share of the weights, over all outcomes."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    outcomes = 0
    for chance, live in Enumerator.walk(lambda door: run(config, wanted, door)):
        outcomes += 1
        for tokens, log, _ in live.answers:
            found[tuple(tokens)] += chance * math.exp(log) / config.n
    return {text: value for text, value in found.items() if value}, outcomes


@pytest.mark.parametrize("refusals", [0, 1])
@pytest.mark.parametrize("estimator", ["auto", "recursive", "geometric"])
def test_weights_are_unbiased_and_so_is_the_evidence(estimator: str, refusals: int) -> None:
    wanted = setting()
    config = Awrs(1, estimator=estimator, refusals=refusals)
    found, outcomes = expected(config, wanted)
    want = free(wanted)
    assert len(want) > 3 and outcomes > 20 and sum(want.values()) < 0.9
    assert found.keys() == want.keys()
    assert all(abs(found[text] - want[text]) < laws.EXACT for text in want)


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_particles_that_are_drawn_anew_keep_the_evidence(threshold: float) -> None:
    wanted = setting(2)
    found, _ = expected(Awrs(2, threshold), wanted)
    want = free(wanted)
    assert all(abs(found[text] - want[text]) < laws.EXACT for text in want)


@pytest.mark.parametrize("spec", ["form", "form, ends", "plain", "top-p"])
def test_one_particle_has_the_law_of_masks(spec: str) -> None:
    for estimator in rejection.ESTIMATORS:
        laws.check_law(Awrs(1, estimator=estimator), spec, tokens=2, drafts=False)
