"""A commit may keep fewer rows than were accepted: a model with a state and no rows, drafted for.

(The other user are heads, whose rows of estimates are not kept: test_heads.py.)
"""

from __future__ import annotations

import pytest

from foretell.core.refusals import unmet_capability
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import ToyRecurrent
from tests import laws
from tests.cache.users import Guess, run

VOCAB = 8
PROMPT = [1, 2, 3, 1, 2, 3, 1]
SAMPLINGS = [Sampling(max_new_tokens=24), Sampling(max_new_tokens=24, temperature=0.8, seed=3)]


def models() -> dict[str, ToyRecurrent]:
    near = ToyRecurrent(VOCAB, seed=3, noise=0.3, name="near")
    return {"target": ToyRecurrent(VOCAB, seed=3), "draft": near}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_chains_say_what_plain_decoding_says(sampling: Sampling, wrong: int) -> None:
    plain = run(models(), Request(PROMPT, Plain(), sampling))[0].ctx.output
    drafter = Guess((*PROMPT, *plain), 5, wrong, vocab=VOCAB)
    request = Request(PROMPT, Speculative(drafter, nodes=16), sampling)
    for options in ({}, {"chunk": 1}, {"chunk": 3}, {"preempt": 3}):
        live = run(models(), request, **options)[0]
        assert live.ctx.output == plain
        stats = live.ctx.stats
        assert (stats.accepted == stats.drafted) == (wrong == 0)
        assert bool(stats.accepted) == (wrong != 1)


def test_a_draft_model_with_a_state_as_well() -> None:
    sampling = SAMPLINGS[0]
    plain = run(models(), Request(PROMPT, Plain(), sampling))[0].ctx.output
    live = run(models(), Request(PROMPT, laws.build("draft"), sampling))[0]
    assert live.ctx.output == plain and 0 < live.ctx.stats.accepted < live.ctx.stats.drafted


def test_the_law_of_drawn_chains() -> None:
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    worlds = {
        "target": ToyRecurrent(3, seed=3),
        "draft": ToyRecurrent(3, seed=3, noise=0.5, name="near"),
    }
    law, plain = (
        laws.enumerate_law(strategy, laws.PROMPT, setting, worlds, warm=False)
        for strategy in (laws.build("draft:length=2"), Plain())
    )
    assert law.distance(plain.outputs) <= laws.EXACT
    assert 0 < law.accepted < law.drafted


@pytest.mark.parametrize("spec", ["ngram", "suffix:tree=False", "draft", "copyspec"])
def test_the_law_of_methods_on_a_target_of_chains(spec: str) -> None:
    """Enumerated, alone and after other requests have filled their stores."""
    worlds = {
        "target": ToyRecurrent(3, seed=3),
        "draft": ToyRecurrent(3, seed=3, noise=0.5, name="near"),
    }
    accepted = 0
    for warm in (False, True):
        setting = laws.Setting(Sampling(max_new_tokens=3, temperature=0.9))
        prompt = [1, 2, 1, 2, 1]
        law, plain = (
            laws.enumerate_law(strategy, prompt, setting, worlds, warm=warm)
            for strategy in (laws.build(spec, nodes=3), Plain())
        )
        assert law.distance(plain.outputs) <= laws.EXACT
        accepted += law.accepted
    assert accepted > 0, "nothing was ever accepted: not put to the test"


@pytest.mark.parametrize("spec", laws.claiming("exact"))
def test_every_drafter_gives_plain_texts_or_is_refused_by_name(spec: str) -> None:
    """What it `needs` is looked at first; what only turns out later ends its request."""
    strategy = laws.build(spec)
    plain = run(models(), Request(PROMPT, Plain(), SAMPLINGS[0]))[0].ctx.output
    request = Request(PROMPT, strategy, SAMPLINGS[0], name=spec)
    engine = Engine(models())
    name = spec.partition(":")[0]
    if {*strategy.needs} - models()["target"].caps:
        with pytest.raises(Unsupported, match=f"^{name}.* on recurrent: it needs the capability"):
            engine.add(request)
        return
    try:
        live = engine.add(request)
    except (Unsupported, BadConfig) as error:  # what it brings cannot be made of these models
        assert name in str(error)
        return
    list(engine.run())
    if live.error is None:
        assert live.ctx.output == plain
    else:
        assert isinstance(live.error, Unsupported) and name in str(live.error)


def test_batches_equal_alone() -> None:
    requests = []
    for i in range(6):
        strategy = [Plain(), laws.build("suffix"), laws.build("draft")][i % 3]
        if i % 3 == 1:
            strategy = Speculative(Guess((*PROMPT, *PROMPT, *PROMPT), vocab=VOCAB), nodes=8)
        requests.append(Request(PROMPT[: 7 - i], strategy, SAMPLINGS[i % 2], tenant=str(i)))
    alone = [run(models(), request)[0].ctx.output for request in requests]
    for options in ({}, {"chunk": 2}):
        assert [live.ctx.output for live in run(models(), *requests, **options)] == alone


def test_a_tree_is_refused_with_all_names() -> None:
    """Method, model, capability and cure."""
    tree = TokenTree(1).chain([2]).chain([3])
    assert unmet_capability(models()["target"], Ask(tree)) == ("branching trees", 3)
    assert unmet_capability(models()["target"], Ask(TokenTree(1).chain([2, 3]))) is None
    assert unmet_capability(models()["target"], Ask(tree, taps=(1,))) == ("hidden states", (1,))
    wide = Guess((*PROMPT, *PROMPT), wide=True, vocab=VOCAB)
    engine = Engine(models())
    live = engine.add(Request(PROMPT, Speculative(wide, nodes=8), name="guess"))
    other = engine.add(Request(PROMPT, Plain(), SAMPLINGS[0]))
    list(engine.run())
    assert isinstance(live.error, Unsupported) and not live.caches
    for name in ("guess", "recurrent", "branching trees", "use another method or model"):
        assert name in str(live.error)
    assert len(other.ctx.output) == 24, "it ends alone"


def test_closing_early_leaves_the_state_of_the_text() -> None:
    drafter = Guess((*PROMPT, *PROMPT, *PROMPT), vocab=VOCAB)
    for count in range(1, 9):
        worlds = models()
        engine = Engine(worlds)
        live = engine.add(Request(PROMPT, Speculative(drafter, nodes=8), SAMPLINGS[0]))
        for _ in range(count):
            engine.step()
        caches, text = dict(live.caches), list(live.ctx.tokens)
        engine.end(live)
        assert not live.caches and not engine.live
        for (name, _), held in caches.items():
            laws.check_cache(held, worlds[name], text)


def test_a_forgotten_cache_begins_again() -> None:
    model = models()["target"]
    held = model.cache()
    ask = Ask(TokenTree(PROMPT[-1]).chain([4, 5]))
    for text in (PROMPT, [*PROMPT, 4, 5, 6]):
        ask.tree = TokenTree(text[-1]).chain([4, 5])
        job, _ = held.prepare(ask, text, 99)
        model.forward([job])
    assert held.length
    held.forget()
    laws.check_cache(held, model, PROMPT)


def test_a_state_that_was_kept_too_far_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip: all of the scratch is kept, whatever was accepted."""
    cache_type = type(models()["target"].cache())

    def greedy(self: object, nodes: list[int]) -> int:
        if nodes:
            self.committed = self.ahead  # type: ignore[attr-defined]
        return len(nodes)

    monkeypatch.setattr(cache_type, "keep_nodes", greedy)
    plain = run(models(), Request(PROMPT, Plain(), SAMPLINGS[0]))[0].ctx.output
    drafter = Guess((*PROMPT, *plain), 5, 3, vocab=VOCAB)
    request = Request(PROMPT, Speculative(drafter, nodes=16), SAMPLINGS[0])
    assert run(models(), request)[0].ctx.output != plain
