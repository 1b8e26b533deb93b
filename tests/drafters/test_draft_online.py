"""`draft:online` learns where its tokens were tested: more is accepted, and no text changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import foretell
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.model.draft import Draft
from foretell.drafters.model.trimming import trim_head
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.models.online import PLACES, Learner
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_learning import ToyLearning
from tests import laws, tiny

SPEC = "draft:length=3,online=1,rate=0.01"
TOKENS = 16


def engine(kept: int = 0) -> Engine:
    """A target and a draft model that has nothing in common with it; of `kept` tokens, if any."""
    tokenizer = tiny.tokenizer()
    draft = tiny.llama(5, vocab_size=len(tokenizer))
    lm = foretell.wrap(tiny.llama(), tokenizer, draft, "tiny")
    models = dict(lm.models)
    if kept:
        decoder: Any = models["draft"]
        models["draft"] = trim_head(decoder, range(kept))
        models["draft"].tokenizer = decoder.tokenizer
    return Engine(models, lm.engine.eos)


def request(text: str, spec: str = SPEC, tenant: str = "", seed: int = 0) -> Request:
    prompt = tiny.tokenizer()(text)["input_ids"]
    strategy = laws.build(spec, nodes=4) if spec else Plain()
    temperature = 0.7 if seed else 0.0
    sampling = Sampling(temperature=temperature, seed=seed, max_new_tokens=TOKENS)
    return Request(prompt, strategy, sampling, tenant=tenant)


def serve(host: Engine, *requests: Request) -> list[Any]:
    lives = [host.add(one) for one in requests]
    laws.finish(host, *lives)
    return lives


def rate(live: Any) -> float:
    return float(live.ctx.stats.accepted / live.ctx.stats.drafted)


@pytest.mark.parametrize("kept", [0, 240])
def test_more_is_accepted_and_the_text_stays(kept: int) -> None:
    host = engine(kept)
    hf: Any = host.models["draft"].hf  # type: ignore[attr-defined]
    weights = copy.deepcopy(hf.state_dict())
    [plain] = serve(host, request("def add", ""))
    rates = []
    for _ in range(8):
        [live] = serve(host, request("def add"))
        assert live.ctx.output == plain.ctx.output
        rates.append(rate(live))
    assert rates[0] < 0.1 and rates[-1] > 0.15, rates
    assert all(torch.equal(weights[name], kept) for name, kept in hf.state_dict().items())
    [other] = serve(host, request("def add", tenant="other"))
    assert rate(other) == pytest.approx(rates[0])


def test_seeds_have_plain_decodings_tokens_also_when_several_run_at_once() -> None:
    host = engine()
    texts = [("def add", 0), ("The quick", 3), ("def sub", 4)]
    plain = [live.ctx.output for live in serve(host, *(request(t, "", "", s) for t, s in texts))]
    for _ in range(2):
        lives = serve(host, *(request(text, seed=seed) for text, seed in texts))
        assert [live.ctx.output for live in lives] == plain
    model: Any = lives[0].ctx.models["draft"]
    assert model.begun, "nothing had been learnt"


def test_lessons_are_the_tested_places_with_the_targets_laws() -> None:
    """By a loop over the rows of the toy target: the first of them, none after a refused token."""
    models = {"target": Toy(4, 3), "draft": ToyLearning(4, 3, noise=0.6, name="draft")}
    host = Engine(models)
    strategy = laws.build("draft:length=2,online=2", nodes=3)
    live = host.add(Request([0, 1, 2], strategy, Sampling(max_new_tokens=9)))
    laws.finish(host, live)
    [learner] = [one for one in host.stores.values() if isinstance(one, Learner)]
    [lesson] = learner.lessons
    assert lesson.forward and lesson.ids == live.ctx.tokens and lesson.direct
    for place, tokens, chances in zip(lesson.direct, lesson.tokens, lesson.chances, strict=True):
        own = torch.tensor(laws.row(models["target"], lesson.ids[:place])).softmax(-1)
        assert torch.allclose(own[tokens].float(), chances, atol=1e-6)
    assert len(lesson.direct) <= PLACES
    tested = sum(n for n, _ in live.ctx.stats.by_depth)
    assert len(lesson.direct) == tested


def test_what_it_cannot_do_is_told() -> None:
    with pytest.raises(BadConfig, match=r"drafts=2,online=1: there is one best chain"):
        Draft(drafts=2, online=1)
    for field, value in (("online", -1), ("online", 257), ("rate", 0.0), ("rate", 2.0)):
        with pytest.raises(BadConfig, match=f"draft:{field}"):
            Draft(**{field: value})  # type: ignore[arg-type]
    toys = Engine({"target": Toy(4), "draft": Toy(4, name="draft")})
    with pytest.raises(Unsupported, match=r"draft:online cannot run on draft.*set online=0"):
        toys.add(Request((0, 1), laws.build(SPEC)))
