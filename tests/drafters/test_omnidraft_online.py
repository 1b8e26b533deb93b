"""The draft model learns between requests: what is written is the same, more of it is accepted."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import foretell
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import RequestFailed, Unsupported
from foretell.models.decoder import learning
from foretell.models.decoder.decoder import Decoder
from foretell.strategies.plain import Plain
from tests import laws, tiny, vocabularies

SPEC = "omnidraft:length=3,online=2"
TOKENS = 24


@cache
def other_tokenizer() -> PreTrainedTokenizerFast:
    """The end and all bytes, in another order, and fewer merges than the target's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=262,
        special_tokens=["<other>", tiny.EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(tiny.TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=tiny.EOS, clean_up_tokenization_spaces=False
    )


def engine() -> Engine:
    """A target and a draft model that has nothing in common with it."""
    draft = tiny.llama(5, vocab_size=len(other_tokenizer()))
    lm = foretell.wrap(
        tiny.llama(), tiny.tokenizer(), draft, "tiny", tokenizers={"draft": other_tokenizer()}
    )
    return Engine(lm.models, lm.engine.eos)


def request(text: str, spec: str = SPEC, tenant: str = "", seed: int = 0) -> Request:
    prompt = tiny.tokenizer()(text)["input_ids"]
    # Drafts of a given size: what is learnt must not depend on what pays in so small a model.
    strategy = laws.build(spec, nodes=4) if spec else Plain()
    temperature = 0.7 if seed else 0.0
    sampling = Sampling(temperature=temperature, seed=seed, max_new_tokens=TOKENS)
    return Request(prompt, strategy, sampling, tenant=tenant)


def serve(host: Engine, *requests: Request) -> list[Any]:
    lives = [host.add(one) for one in requests]
    for _ in host.run():
        pass
    for live in lives:
        if live.error is not None:
            raise live.error
    return lives


def numbers(live: Any) -> tuple[list[int], int, int]:
    """What a request wrote, and what was drafted and accepted for it."""
    assert live.error is None
    return live.ctx.output, live.ctx.stats.drafted, live.ctx.stats.accepted


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "RATE", 0.01)


def test_more_is_accepted_and_the_text_stays(fast: None) -> None:
    spec = "omnidraft:length=3,online=1"
    host = engine()
    weights = copy.deepcopy(host.models["draft"].hf.state_dict())  # type: ignore[attr-defined]
    [plain] = serve(host, request("def add", ""))
    rates = []
    for _ in range(24):
        [live] = serve(host, request("def add", spec))
        assert live.ctx.output == plain.ctx.output
        rates.append(live.ctx.stats.accepted / live.ctx.stats.drafted)
    assert rates[0] < 0.1 and min(rates[-4:]) > 0.25, rates
    after = host.models["draft"].hf.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    [other] = serve(host, request("def add", spec, "other"))
    assert other.ctx.stats.accepted / other.ctx.stats.drafted == pytest.approx(rates[0])


def test_a_running_request_keeps_its_weights(fast: None) -> None:
    """Alone or while others have the model learn, it drafts and draws the same."""
    spec = "omnidraft:length=3,online=1"
    found = []
    for crowd in (False, True):
        host = engine()
        first = request("The quick", spec, seed=3)
        first.sampling = replace(first.sampling, max_new_tokens=110)
        long = host.add(first)
        while len(long.ctx.output) < 4:
            host.step()
        if crowd:
            for _ in range(3):
                other = host.add(request("def sub", spec))
                while other in host.live:
                    host.step()
                assert other.error is None
            model: Any = other.ctx.models["draft"]
            assert model.begun and long in host.live
        for _ in host.run():
            pass
        found.append(numbers(long))
    assert found[0] == found[1]


def test_requests_of_other_weights_share_forwards(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose requests have different weights gives each what it gets alone."""
    mixed: list[int] = []
    right = learning.Learning.compute

    def note(self: Any, jobs: Any, taps: Any) -> Any:
        mixed.append(len({id(job.cache.weights) for job in jobs}))
        return right(self, jobs, taps)

    monkeypatch.setattr(learning.Learning, "compute", note)
    spec = "omnidraft:length=3,online=2,width=0"  # what is noted of sequences is shared as well
    found = []
    for crowd in (True, False):
        host = engine()
        early = request("The quick", spec, seed=3)
        early.sampling = replace(early.sampling, max_new_tokens=110)
        if crowd:
            running = host.add(early)
            host.step()
        outcomes = []
        for seed in (0, 0, 4):
            live = host.add(request("def sub", spec, seed=seed))
            while live in host.live:
                host.step()
            outcomes.append(numbers(live))
        if crowd:
            assert running in host.live and max(mixed) == 2
            for _ in host.run():
                pass
        else:
            running = serve(engine(), early)[0]
        found.append((numbers(running), outcomes))
    assert found[0] == found[1]


def test_learning_that_fails_is_told_by_name_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = engine()
    serve(host, request("def add"))
    serve(host, request("def add"))
    monkeypatch.setattr(learning.Lesson, "loss", lambda *_: torch.tensor(torch.nan))
    with pytest.raises(
        RequestFailed, match=r"online: .* could not learn from 2 responses.*online=0"
    ):
        serve(host, request("def add"))
    serve(host, request("def add"))


def test_models_that_cannot_learn_are_refused_with_the_cure() -> None:
    toys = Engine(vocabularies.pair("sequences"))
    with pytest.raises(Unsupported, match=r"omnidraft:online cannot run on draft.*set online=0"):
        toys.add(Request((0, 1), laws.build(SPEC)))
    host = engine()
    draft: Any = host.models["draft"]
    assert type(draft) is Decoder
    draft.narrow = True
    with pytest.raises(Unsupported, match=r"weights torch can train.*set online=0"):
        host.add(request("def add"))


def test_a_budget_of_bytes_is_refused_since_learnt_weights_come_to_it() -> None:
    host = engine()
    host.admission.budget = 1 << 34
    with pytest.raises(Unsupported, match=r"a budget cannot run on .*weights that stay as they"):
        host.add(request("a text", "omnidraft:length=3,online=2"))
