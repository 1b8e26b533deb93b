"""Adaptive weighted rejection sampling: laws and weights by enumeration, on forms of letters."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

import pytest

from foretell.core.request import Request
from foretell.core.types import Drop, Fork, Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig
from foretell.guidance.cfg import Cfg
from foretell.strategies.plain import Plain
from foretell.strategies.samples import awrs
from foretell.strategies.samples.awrs import Awrs, Particle
from foretell.strategies.samples.rejection import Trial, draw_recursively
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from tests import laws
from tests.core.test_constraint import Listed

SPECS = ["awrs:n=1", "awrs:n=3,estimator=geometric,accepts=3"]
PROMPT = (0, 1, 2, 0)
FORM = "[ab](a|b[ab])?"  # of texts of a, b and an end; after ab there must be one letter more
END = 2


def setting(tokens: int = 2, **options: Any) -> laws.Setting:
    return laws.formed(FORM, 3, eos=(END,), max_new_tokens=tokens, temperature=1.0, **options)


def letters(form: str, tokens: int) -> laws.Setting:
    """Of texts of a and b, which end where nothing can follow."""
    return laws.formed(form, 2, max_new_tokens=tokens, temperature=1.0)


def run(config: Any, wanted: laws.Setting, door: Any = None, prompt: Any = PROMPT) -> Live:
    engine = Engine({"target": Toy(wanted.vocab, 3, copy=0.5)}, wanted.eos)
    prompt = [token % wanted.vocab for token in prompt]
    live = engine.add(Request(prompt, config, wanted.sampling, text=laws.spell, rng=door))
    list(engine.run())
    assert live.error is None, live.error
    assert not live.caches and list(live.ctx.branches) == [0]
    return live


def free(wanted: laws.Setting) -> dict[tuple[int, ...], float]:
    """The probability of each text of the form that the model alone writes, by plain loops."""
    vocab = wanted.vocab
    model = Toy(vocab, 3, copy=0.5)
    prompt = [token % vocab for token in PROMPT]
    plain = laws.Setting(Sampling(temperature=1.0), wanted.eos)
    found: dict[tuple[int, ...], float] = {}

    def go(output: tuple[int, ...], chance: float) -> None:
        text = output[:-1] if output[-1:] == (END,) else output
        complete = wanted.whole(text) and not wanted.follows(text, vocab)
        if output and (text != output or complete or len(output) == wanted.sampling.max_new_tokens):
            if wanted.whole(text):
                found[output] = chance
            return
        for token, p in enumerate(laws.expected_law(model, prompt, output, plain)):
            go((*output, token), chance * p)

    go((), 1.0)
    return found


Law = dict[tuple[int, ...], float]


def outcomes(config: Awrs, wanted: laws.Setting) -> tuple[Law, Law, int]:
    """Of each text its probability of being the answer, and the mean of its particles' weights."""
    law: Law = defaultdict(float)
    weights: Law = defaultdict(float)
    count = 0
    for chance, live in Enumerator.walk_outcomes(lambda door: run(config, wanted, door)):
        count += 1
        law[tuple(live.ctx.output)] += chance
        for tokens, log, _ in live.answers:
            weights[tuple(tokens)] += chance * math.exp(log) / config.n
    return law, weights, count


def distance(found: Law, want: Law) -> float:
    return max(abs(found.get(text, 0.0) - want.get(text, 0.0)) for text in {*found, *want})


def off(config: Awrs, wanted: laws.Setting) -> float:
    """The largest difference between a text's probability and the mean of its weights."""
    want = free(wanted)
    assert len(want) > 2 and sum(want.values()) < 0.9
    return distance(outcomes(config, wanted)[1], want)


@pytest.mark.parametrize("refusals", [0, 1])
@pytest.mark.parametrize("estimator", ["auto", "recursive", "geometric"])
def test_weights_are_unbiased(estimator: str, refusals: int) -> None:
    assert off(Awrs(1, estimator=estimator, refusals=refusals), setting()) < laws.EXACT


def test_two_particles_keep_the_evidence_and_come_nearer_to_the_law_given_the_whole_form() -> None:
    """Weights are uneven after the second of three tokens, so there particles are drawn anew."""
    wanted, times = letters("(a|b)b(a|b)", 3), 0

    class Noting(Awrs):
        def resample_particles(self, *args: Any) -> Any:
            nonlocal times
            times += 1
            return (yield from super().resample_particles(*args))

    chances = free(wanted)
    total = sum(chances.values())
    given = {text: chance / total for text, chance in chances.items()}
    law, weights, count = outcomes(Noting(2, 1.0, "recursive"), wanted)
    assert times > count / 4
    assert distance(weights, chances) < laws.EXACT
    masked, _, _ = outcomes(Awrs(1), wanted)
    assert 0 < distance(law, given) < 0.8 * distance(masked, given)


def ancestry(config: Awrs, logs: list[float]) -> list[float]:
    """The mean weight that stems from each particle once they have been drawn anew."""
    found = [0.0] * len(logs)

    def once(door: Enumerator) -> dict[int, float]:
        engine = Engine({"target": Toy(3)})
        ctx = engine.add(Request([0], Plain(), Sampling(temperature=1.0), rng=door)).ctx
        steps = config.resample_particles(
            ctx, [Particle(branch, log) for branch, log in enumerate(logs)], 1
        )
        parents = {branch: branch for branch in range(len(logs))}
        answer: Any = None
        while True:
            try:
                message = steps.send(answer)
            except StopIteration as end:
                drawn = end.value
                break
            if isinstance(message, Fork):
                answer = list(range(len(parents), len(parents) + message.n))
                parents |= dict.fromkeys(answer, message.branch)
            else:
                assert isinstance(message, Drop) and message.branch
                answer = None
        share: dict[int, float] = defaultdict(float)
        for particle in drawn:
            share[parents[particle.branch]] += math.exp(particle.log)
        assert len(drawn) == config.n == len({one.branch for one in drawn})
        return share

    for chance, share in Enumerator.walk_outcomes(once):
        for branch, weight in share.items():
            found[branch] += chance * weight
    return found


def test_particles_are_drawn_anew_in_proportion_to_their_weights() -> None:
    weights = [0.5, 0.0, 0.125, 1.0]
    logs = [math.log(weight) if weight else -math.inf for weight in weights]
    assert ancestry(Awrs(4), logs) == pytest.approx(weights, abs=1e-12)

    class Slip(Awrs):
        """Keeps the weights by which it has drawn."""

        def resample_particles(self, ctx: Any, particles: Any, place: int) -> Any:
            kept = {particle.branch: particle.log for particle in particles}
            drawn = yield from super().resample_particles(ctx, particles, place)
            return [Particle(one.branch, kept.get(one.branch, one.log)) for one in drawn]

    assert ancestry(Slip(4), logs) != pytest.approx(weights, abs=1e-2)


@pytest.mark.parametrize(
    ("spec", "estimator"),
    [("form", "recursive"), ("form, ends", "geometric"), ("plain", "auto"), ("top-p", "auto")],
)
def test_one_particle_has_the_law_of_masks(spec: str, estimator: str) -> None:
    laws.check_law(Awrs(1, estimator=estimator), spec, tokens=2, drafts=False)


def unweighted(trial: Trial, *_: Any) -> tuple[int, float]:
    """As if masks lost nothing."""
    return draw_recursively(trial)[0], 1.0


def ordered(trial: Trial, *_: Any) -> tuple[int, float]:
    """Likelier tokens first, without noise."""
    return draw_recursively(dataclasses.replace(trial, draw=lambda law: int(law.argmax())))


def test_slips_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awrs, "draw_weighted", unweighted)
    assert off(Awrs(1), setting()) > 1e-2
    laws.check_law(Awrs(1), "form", tokens=2, drafts=False)
    monkeypatch.setattr(awrs, "draw_weighted", ordered)
    assert off(Awrs(1), setting()) > 1e-2
    with pytest.raises(AssertionError):
        laws.check_law(Awrs(1), "form", tokens=2, drafts=False)


def test_all_particles_stand_in_the_output_with_their_weights() -> None:
    live = run(Awrs(6), setting(3))
    assert live.answers[0][0] == live.ctx.output and len(live.answers) == 6
    scores = [score for _, score, _ in live.answers[1:]]
    assert scores == sorted(scores, reverse=True) and all(score < 0 for score in scores)
    assert live.ctx.stats.checks >= 6


def test_a_cut_text_counts_nothing_and_is_the_answer_only_if_all_were_cut() -> None:
    cut = run(Awrs(3), letters("aa(a|b)b", 3))
    assert cut.reason == "length" and {score for _, score, _ in cut.answers} == {-math.inf}
    seen = set()
    constraint = Listed([0, 0], [1, 2, 1])  # which knows no ending of its texts
    for seed in range(12):
        sampling = Sampling(temperature=1.0, constraint=constraint, seed=seed, max_new_tokens=2)
        live = run(Awrs(4), laws.Setting(sampling, vocab=6))
        for tokens, score, _ in live.answers:
            broken = tokens == [1, 2]
            assert (score == -math.inf) == broken
            seen.add(broken)
        assert live.answers[0][1] > -math.inf or len(live.answers) == 4
    assert seen == {True, False}


def test_texts_end_in_time_with_the_weights_of_those_that_fit() -> None:
    """After ab one letter more is needed, which has no room."""
    seen = set()
    for seed in range(12):
        wanted = setting()
        sampling = dataclasses.replace(wanted.sampling, seed=seed)
        for tokens, score, _ in run(
            Awrs(4), dataclasses.replace(wanted, sampling=sampling)
        ).answers:
            assert score > -math.inf and tuple(tokens) in free(wanted)
            seen.add(tuple(tokens))
    assert (0, 1) not in seen and len(seen) > 2


def test_a_particle_that_nothing_can_follow_is_left_out() -> None:
    """After b the form wants what is banned; after a it does not."""
    constraint, banned = Listed([0, 0], [1, 2]), {0: 2.0, 2: -math.inf}
    left = set()
    for seed in range(8):
        sampling = Sampling(
            temperature=1.0, constraint=constraint, logit_bias=banned, seed=seed, max_new_tokens=4
        )
        live = run(Awrs(12, threshold=0.0), laws.Setting(sampling, vocab=6))
        assert {tuple(tokens) for tokens, *_ in live.answers} == {(0, 0)}
        left.add(len(live.answers))
    assert min(left) < 12
    sampling = Sampling(temperature=1.0, constraint=Listed([2]), logit_bias=banned)
    engine = Engine({"target": Toy(6)})
    live = engine.add(Request([0], Awrs(2), sampling))
    list(engine.run())
    assert isinstance(live.error, BadConfig) and "leave no token possible" in str(live.error)


def test_without_a_form_and_at_temperature_0_it_is_plain_decoding() -> None:
    for seed in range(4):
        for sampling in (
            Sampling(temperature=1.0, seed=seed, max_new_tokens=9),
            dataclasses.replace(setting(6).sampling, temperature=0.0),
        ):
            wanted = laws.Setting(sampling, (END,), vocab=3)
            assert run(Awrs(), wanted).ctx.output == run(Plain(), wanted).ctx.output


def test_a_form_that_allows_all_checks_each_token_once_or_twice_and_weighs_nothing() -> None:
    wanted = laws.formed("[abc]*", 3, max_new_tokens=4, temperature=1.0)
    live = run(Awrs(3), wanted)
    assert [score for _, score, _ in live.answers] == pytest.approx([0.0] * 3, abs=1e-12)
    assert 3 * 4 <= live.ctx.stats.checks <= 2 * 3 * 4


def test_other_requests_change_nothing_and_a_close_leaks_nothing() -> None:
    laws.check_close(Awrs(3), 1.0)
    wanted = setting(3)
    alone = run(Awrs(3), wanted)
    engine = Engine({"target": Toy(3, 3, copy=0.5)}, wanted.eos)
    lives = [engine.add(Request(PROMPT, Awrs(3), wanted.sampling, text=laws.spell))]
    lives += [engine.add(Request([1, n], Plain(), Sampling(temperature=1.0))) for n in range(3)]
    list(engine.run())
    assert lives[0].answers == alone.answers
    engine = Engine({"target": Toy(3, 3, copy=0.5)}, wanted.eos)
    live = engine.add(Request(PROMPT, Awrs(5, threshold=1.0), wanted.sampling, text=laws.spell))
    for _ in range(2):
        engine.step()
    engine.end(live)
    assert not live.caches and not engine.live


def test_what_cannot_be_is_refused() -> None:
    for fields in (
        {"n": 0},
        {"threshold": 2},
        {"estimator": "x"},
        {"accepts": 1},
        {"refusals": -1},
    ):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            Awrs(**fields)
    for option, value in (("top_k", 3), ("top_p", 0.9), ("min_p", 0.1), ("typical_p", 0.9)):
        sampling = dataclasses.replace(setting().sampling, **{option: value})
        with pytest.raises(BadConfig, match=f"awrs cannot honour {option}"):
            Engine({"target": Toy(3)}).add(Request([0], Awrs(), sampling))
    with pytest.raises(BadConfig, match="awrs reads the target itself"):
        request = Request([0], Awrs(), setting().sampling, source=Cfg())
        Engine({"target": Toy(3)}).add(request)
