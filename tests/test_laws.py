"""Every method the registry finds is held to what its card claims; no method is named here.

A method's own test file may list more specs of it as SPECS, which then come under the same laws.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest

from foretell import cards, registry
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.spec import AUTO, DRAFT, HEAD, QUICK, resolve_method
from foretell.speculation.strategy import Speculative, Strategy
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.laws import proof

DRAFTERS = laws.claiming("exact")
EXACT = [*DRAFTERS, *laws.claiming("exact", kind="strategy")]
CASES = laws.spread_out(DRAFTERS)
FIRSTS = [spec for spec in DRAFTERS if laws.is_first(spec)]
LEARNING = [spec for spec in DRAFTERS if laws.leaves_something(spec)]


def in_turn(specs: list[str], law: int) -> list[str]:
    """Every method, and a third of the further specs: the exact law, rules, ends and forms are of
    all of them, and of the other laws each such spec comes under every third.
    """
    return [spec for place, spec in enumerate(specs) if laws.is_first(spec) or place % 3 == law % 3]


THREE = in_turn(DRAFTERS, 0)
# Others leave no more than counts, which decide nothing where the number of nodes is given.
SHARING = [*LEARNING, *[spec for spec in FIRSTS if spec not in LEARNING][::6]]
# What a lossy rule changes is the rule's own doing: a few drafters show it.
LOSSY = [
    (spec, rule)
    for place, spec in enumerate(FIRSTS)
    for number, rule in enumerate(laws.rules_for(spec, exact=False))
    if (place + number) % 4 == 0
]


def test_the_simplest_law_is_proved_and_a_slip_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    proof.prove_ngram_is_exact()
    monkeypatch.setattr(proof, "TEMPERATURE", 0.9)
    with pytest.raises(AssertionError):
        proof.prove_ngram_is_exact()


def test_there_is_something_to_hold_to_the_laws() -> None:
    assert DRAFTERS and CASES and LOSSY and LEARNING and "plain" in EXACT
    met = {(rule, setting) for _, rule, setting in CASES}
    lossy = {rule for _, rule in LOSSY}
    for rule in registry.method_names("rule"):
        assert rule in lossy or all((rule, setting) in met for setting in laws.SETTINGS), (
            f"no drafter's trees suit the rule {rule!r} with every setting: it went untested"
        )
    for spec in FIRSTS:
        settings = {setting for one, _, setting in CASES if one == spec}
        assert settings in (set(), set(laws.SETTINGS)), f"{spec}: {settings}"


@pytest.mark.parametrize(("spec", "rule", "setting"), CASES)
def test_exact_law(spec: str, rule: str, setting: str) -> None:
    laws.check_law(laws.build(spec, rule), setting)


@pytest.mark.parametrize(
    ("spec", "warm"), [*((spec, False) for spec in DRAFTERS), *((spec, True) for spec in SHARING)]
)
def test_exact_law_of_the_default_rule(spec: str, warm: bool) -> None:
    if warm or spec not in THREE:  # whose law is that of three tokens
        laws.check_law(laws.build(spec), "plain", warm=warm)
    if laws.is_first(spec):
        laws.check_law(laws.build(spec, nodes=3), "penalties", warm=warm, vocab=4, tokens=2)


@pytest.mark.parametrize("spec", THREE)
def test_exact_law_of_three_tokens(spec: str) -> None:
    law = laws.check_law(laws.build(spec), "plain", tokens=3)
    if law.depth < 2 and ":" not in spec:  # its first draft may be of one token, or it is not sure
        prompt = (0, 1, 0, 1, 0)
        law = laws.check_law(laws.build(spec), "plain", 4, prompt=prompt, vocab=2, sharpness=16.0)
    assert law.depth >= 2 or ":" in spec, "no draft of two levels was tested"


def measured(engine: Engine) -> None:
    """Costs as if measured beforehand, by which drafts come, grow and pause after a step or two."""
    for name in ("target", "draft"):
        if name in engine.models:
            costs = engine.costs_of(engine.models[name])
            costs.seconds = {1: 1.0, 8: 1.05, 16: 1.1, 128: 3.0}
            costs.freeze_curve()
    for key in [key for key in engine.stores if key[2].startswith(("worth", "pace", "promise"))]:
        del engine.stores[key]  # by the clock of the toys nothing is worth drafting


@pytest.mark.parametrize("spec", in_turn(DRAFTERS, 1))
def test_exact_law_where_the_policy_decides_what_is_drafted(spec: str) -> None:
    strategy = laws.build(spec, nodes=0)
    law = laws.check_law(strategy, "plain", tokens=2, prepare=measured)
    if law.outcomes <= laws.WIDE:
        laws.check_law(strategy, "penalties", tokens=3, prepare=measured)


@pytest.mark.parametrize("spec", SHARING)
def test_exact_law_while_others_learn_in_the_same_store(spec: str) -> None:
    strategy = laws.build(spec)

    def crowd(engine: Engine) -> None:
        for seed in range(3):
            sampling = Sampling(temperature=1.0, seed=seed, max_new_tokens=9)
            engine.add(Request([seed, 1, 2, 0, 1], strategy, sampling))
        engine.step()

    laws.check_law(strategy, "plain", tokens=2, prepare=crowd, drafts=False)


@pytest.mark.parametrize("setting", laws.SETTINGS)
@pytest.mark.parametrize("spec", laws.claiming("exact", kind="strategy"))
def test_exact_law_of_strategies(spec: str, setting: str) -> None:
    laws.check_law(laws.build(spec), setting, tokens=3, drafts=False)


@pytest.mark.parametrize("spec", [*in_turn(DRAFTERS, 2), *laws.claiming("greedy"), "plain"])
def test_greedy_tokens_are_those_of_plain_decoding(spec: str) -> None:
    rules = laws.rules_for(spec, exact=None) if spec != "plain" else ["default"]
    rules = [
        rule for rule in rules if rule == "default" or registry.load_method(rule, "rule").greedy
    ]
    laws.check_greedy([laws.build(spec, rule) for rule in rules])


@pytest.mark.parametrize("spec", in_turn(EXACT, 0))
def test_alone_as_in_a_mixed_batch(spec: str) -> None:
    others = [s for s in EXACT if s != spec][:3]
    laws.check_batch([laws.build(spec, nodes=5), *(laws.build(s, nodes=5) for s in others)])


@pytest.mark.parametrize("spec", FIRSTS)
def test_exact_law_without_a_seed(spec: str) -> None:
    """Load and time may decide how much is drawn, as they do so before the draw."""
    setting = laws.Setting(Sampling(temperature=1.0, seed=None))
    strategy = laws.build(spec, nodes=0)
    if isinstance(strategy, Speculative) and strategy.drafter.draws:
        laws.check_law(strategy, setting, tokens=2, warm=False, prepare=measured, drafts=False)


@pytest.mark.parametrize("spec", in_turn(EXACT, 1))
def test_beginnings_are_read_once(spec: str) -> None:
    laws.check_prefixes(laws.build(spec), sampled=spec not in LEARNING)


@pytest.mark.parametrize("spec", [AUTO, f"{QUICK}+{HEAD}", f"{QUICK}+{DRAFT}"])
def test_beginnings_are_read_once_by_what_auto_stands_for(spec: str) -> None:
    """As it is, sizes and pauses by cost included."""
    laws.check_prefixes(resolve_method(spec)[1])


@pytest.mark.parametrize("spec", [*SHARING, *laws.claiming("exact", kind="strategy")])
def test_alone_as_among_learners_of_one_tenant(spec: str) -> None:
    """By the default rule, which docs/sampling.md promises; some others it excepts."""
    strategy = laws.build(spec)
    laws.check_batch([strategy] * 3, tenants=False)


@pytest.mark.parametrize("spec", FIRSTS)
def test_sizes_that_the_policy_decides_change_no_token_of_a_seed(spec: str) -> None:
    """Where samples depend on the drafts, neither other requests nor a clock decide their sizes."""
    strategy = laws.build(spec, nodes=0)
    models = laws.world(strategy, 8, copy=2.0)
    outputs = []
    for crowd in (0, 3):
        engine = Engine(models)
        measured(engine)
        sampling = Sampling(temperature=0.9, max_new_tokens=40, seed=1)
        live = engine.add(Request([1, 2, 3, 1, 2], strategy, sampling, tenant="this"))
        for seed in range(crowd):
            sampling = Sampling(temperature=0.9, max_new_tokens=40, seed=seed)
            engine.add(Request([seed, 1, 2], strategy, sampling, tenant=str(seed)))
        laws.finish(engine, live)
        outputs.append(live.ctx.output)
    assert outputs[0] == outputs[1]


def test_what_requests_share_changes_no_token() -> None:
    """Requests of one tenant share stores; with the walk the tokens stay those of each seed."""
    # What those that learn nothing leave decides nothing.
    learners = [spec for spec in LEARNING if laws.is_first(spec)]
    assert any("walk" in laws.rules_for(spec) for spec in learners)
    for spec in learners:
        if "walk" in laws.rules_for(spec):
            strategy = laws.build(spec, "walk")
            models = laws.world(strategy, 8, copy=2.0)
            engine = Engine(models)
            samplings = [
                Sampling(temperature=0.9, seed=seed, max_new_tokens=24) for seed in range(5)
            ]
            lives = [engine.add(Request([1, 2, 3, 1, s.seed], strategy, s)) for s in samplings]
            laws.finish(engine, *lives)
            for live, s in zip(lives, samplings, strict=True):
                plain = laws.generate(
                    Plain(), [1, 2, 3, 1, s.seed], laws.Setting(s), {"target": models["target"]}
                )
                assert live.ctx.output == plain.ctx.output, f"{spec}, seed {s.seed}"


@pytest.mark.parametrize("spec", [*in_turn(DRAFTERS, 2), "plain"])
def test_walk_gives_the_tokens_of_the_seed(spec: str) -> None:
    laws.check_seeds(laws.build(spec, "walk") if spec != "plain" else laws.build(spec))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", EXACT)
def test_nothing_follows_an_end(spec: str, temperature: float) -> None:
    inside = laws.check_ends(laws.build(spec), temperature)
    assert spec == "plain" or inside, "no text ended inside a draft: the case was not tested"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", in_turn(EXACT, 0))
def test_closed_at_any_step_the_caches_are_valid_and_nothing_leaks(
    spec: str, temperature: float
) -> None:
    laws.check_close(laws.build(spec), temperature)


def parts(strategy: Strategy) -> dict[str, Any]:
    """The hyper-parameters a card's cost may name."""
    inner = strategy.drafter if isinstance(strategy, Speculative) else strategy
    return dataclasses.asdict(inner)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("spec", EXACT)
def test_cost_is_what_the_card_says(spec: str) -> None:
    strategy = laws.build(spec, nodes=40)
    name, _, options = spec.partition(":")
    laws.check_cost(strategy, cards.card(name).cost, parts(strategy), exact=not options)


@pytest.mark.parametrize("spec", EXACT)
def test_a_missing_model_or_capability_is_refused_before_the_first_forward(spec: str) -> None:
    strategy = laws.build(spec)
    models = laws.world(strategy)
    for name in {*strategy.models} - {*strategy.bring(models)}:
        left = {k: m for k, m in models.items() if k != name}
        with pytest.raises(Unsupported) as caught:
            Engine(left).add(Request([1, 2], strategy, name=spec))
        for part in (spec, "toy", repr(name), "load"):
            assert part in str(caught.value), f"{caught.value}: does not tell {part!r}"
        assert not any(m.calls for m in left.values())
    caps = models["target"].caps
    for need in strategy.needs:
        models["target"].caps = caps - {need}
        with pytest.raises(Unsupported, match=need):
            Engine(models).add(Request([1, 2], strategy, name=spec))


@pytest.mark.parametrize(("spec", "rule"), LOSSY)
def test_lossy_rules_say_so_and_change_the_law_or_the_greedy_tokens(spec: str, rule: str) -> None:
    """Those that say they are greedy at temperature 0 are held to it with the exact ones, above."""
    card = cards.card(rule, "rule")
    kind, _, change = card.guarantee.partition(":")
    assert kind == "lossy" and len(change.split()) > 3, "what changes must be told"
    changed = pytest.raises(AssertionError, match="the law of the first")
    # A rule that judges what was refused changes no law where a tree holds every token there is.
    with (
        contextlib.suppress(AssertionError) if registry.load_method(rule, "rule").taps else changed
    ):
        laws.check_law(laws.build(spec, rule), "plain")
    if not registry.load_method(rule, "rule").greedy:
        with pytest.raises(AssertionError, match="where plain decoding gives"):
            laws.check_greedy([laws.build(spec, rule)], 20, free=True)


@pytest.mark.parametrize("rule", registry.method_names("rule"))
def test_rule_and_card_agree_on_exactness(rule: str) -> None:
    assert registry.load_method(rule, "rule").exact == (
        cards.card(rule, "rule").guarantee == "exact"
    )


@pytest.mark.parametrize("spec", DRAFTERS)
def test_trees_no_rule_takes_are_refused_by_name(spec: str) -> None:
    fitting = laws.rules_for(spec, exact=None)
    for rule in registry.method_names("rule"):
        if rule not in fitting:
            strategy = laws.build(spec, rule)
            engine = Engine(laws.world(strategy))
            request = Request(laws.PROMPT, strategy, Sampling(temperature=1.0), name=spec)
            error: BaseException | None
            try:
                live = engine.add(request)
                list(engine.run())
                error = live.error
                assert live.reason == "error"
            except BadConfig as refused:  # before anything ran
                error = refused
            assert isinstance(error, BadConfig)
            assert rule in str(error).lower() and "needs" in str(error)
            assert not engine.live


def test_a_toy_model_tells_a_wrong_world_apart() -> None:
    """The laws have power only if the toy's rows depend on every visible token and position."""
    toy = Toy(8)
    base = laws.row(toy, [1, 2, 3, 4])
    for other in ([1, 2, 3], [1, 2, 3, 5], [2, 1, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4, 4]):
        assert laws.row(toy, other) != base


# And whether there are texts that nothing may follow.
FORMS = {"[a-h]{3}(ij|[c-p]{2})*": False, "([a-d][e-p]){2}": True}


def methods() -> list[tuple[str, str]]:
    """Every drafter with the default rule and with others that take its trees, lossy ones too, in
    turn; and its variants.
    """
    pairs = [("plain", "default")]
    for place, name in enumerate(registry.method_names("drafter")):
        first, *others = laws.variants(name)
        rules = [rule for rule in laws.rules_for(first, exact=None) if rule != "default"]
        pairs += [(first, rule) for rule in ["default", *rules[place % 3 :: 3]]]
        pairs += [(spec, "default") for spec in others]
    return pairs


@pytest.mark.parametrize(("spec", "rule"), methods())
def test_a_form_is_honoured_or_refused_by_name(spec: str, rule: str) -> None:
    """Every text has the form at its limit, and one that nothing may follow goes on no further.

    Strategies are held to it in test_forms.py, on a transformer, which some of them need.
    """
    strategy = laws.build(spec, rule)
    for form, ends in FORMS.items():
        for temperature in (0.0, 1.0):
            setting = laws.formed(form, 16, temperature=temperature, max_new_tokens=11)
            models = laws.world(strategy, 16, copy=2.0)
            engine = Engine(models)
            live = engine.add(Request([1, 9, 2, 9, 1, 9, 2], strategy, setting.sampling, name=spec))
            list(engine.run())
            if rule == "synthetic":
                assert isinstance(live.error, BadConfig) and rule in str(live.error)
                assert "json_schema, regex, grammar" in str(live.error)
                continue
            assert live.error is None, live.error
            text = laws.spell(live.ctx.output)
            whole = setting.whole(live.ctx.output)
            assert live.reason == ("stop" if whole else "length"), f"{text} ended by {live.reason}"
            assert whole, f"{text} is not of the form {form}"
            if not ends:
                assert len(live.ctx.output) == 11, f"{text} could have gone on"
