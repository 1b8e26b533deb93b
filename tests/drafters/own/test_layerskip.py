"""Early exit: no layer runs twice for a token, and what is taken from the draft is the right thing.

Its exactness is in test_laws.py; here are the layers it computes, the tokens of a transformer, and
slips that must be caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from foretell.cache import plan
from foretell.cache.job import Job
from foretell.core.model import STEP, Model
from foretell.core.request import Request
from foretell.core.types import Ask, Sampling
from foretell.drafters.own.layerskip import Layerskip
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from foretell.verification.walk import Walk
from tests import laws
from tests.cache.users import run
from tests.models.decoder.families import tiny

SPECS = ["layerskip:exit_layer=2,length=2"]
PROMPT = [1, 2, 3, 1, 2]
TEXT = [(11 * i + i * i) % 90 for i in range(15)]


class Counting(ToyLayers):
    """Notes of every forward how many tokens went through which layers, and with what states."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.ran: list[tuple[int, tuple[int, ...]]] = []

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        layers = tuple(range(self.layers)) if first.layers is None else first.layers
        self.ran.append((len(ids[0]), layers))
        assert all(job.forward_key == first.forward_key for job in STEP.get())
        return super().run(ids, positions, rows, first, taps)

    @property
    def pairs(self) -> int:
        """Of a layer and a token that were computed."""
        return sum(count * len(layers) for count, layers in self.ran)


def test_every_layer_runs_once_for_every_token() -> None:
    """A step of g drafts: g + 1 tokens through the first E layers, then once through the others."""
    model = Counting(8, seed=3)
    layers, early, drafted = model.layers, 1, 3
    strategy = Speculative(Layerskip(early, drafted), nodes=8)
    live = run({"target": model}, Request(PROMPT, strategy, Sampling(max_new_tokens=30)))[0]
    low, high = tuple(range(early)), tuple(range(early, layers))
    first = len(PROMPT)
    begin = [(first, low), *[(1, low)] * drafted, (first + drafted, high)]
    assert model.ran[: len(begin)] == begin
    step = [*[(1, low)] * (drafted + 1), (drafted + 1, high)]
    assert model.ran[len(begin) : len(begin) + len(step)] == step
    stats = live.ctx.stats
    tokens = first - 1 + stats.drafted + stats.steps + 1  # of the prompt, and the root of each step
    assert model.pairs == tokens * layers
    # Layers whose weights are read, as the paper counts: gamma E + L a step.
    assert sum(len(layers) for _, layers in step) == drafted * early + layers
    assert 0 < stats.accepted < stats.drafted


@cache
def llama() -> Decoder:
    """Its last layer changes little, so that an exit before it is often right."""
    hf = tiny("llama")
    last: Any = hf.get_decoder().layers[-1]
    with torch.no_grad():
        last.self_attn.o_proj.weight.mul_(0.2)
        last.mlp.down_proj.weight.mul_(0.2)
    return Decoder(hf, "llama")


def test_a_transformers_tokens_are_those_of_plain_decoding() -> None:
    models: dict[str, Model] = {"target": llama()}
    for temperature, exit_layer in ((0.0, 2), (0.9, 1)):
        sampling = Sampling(max_new_tokens=12, temperature=temperature, seed=2)
        strategy = Speculative(Layerskip(exit_layer, 3), Walk(), nodes=8)
        texts = (TEXT, TEXT[:4])
        plain = [run(models, Request(t, Plain(), sampling))[0].ctx.output for t in texts]
        for options in ({"chunk": 4}, {"preempt": 5}):
            requests = [Request(t, strategy, sampling, tenant=str(len(t))) for t in texts]
            beside = Request(TEXT, Plain(), sampling, tenant="plain")
            *lives, other = run(models, *requests, beside, **options)
            assert [live.ctx.output for live in lives] == plain
            assert other.ctx.output == plain[0]
            assert temperature or lives[0].ctx.stats.accepted


def test_rows_that_were_lost_are_computed_by_all_layers() -> None:
    """Paused between the last early forward and verification, the request goes on as if alone."""
    for steps in (2, 3, 5, 9):
        model = Counting(8, seed=3)
        strategy = Speculative(Layerskip(1, 3), nodes=8)
        request = Request(PROMPT, strategy, Sampling(max_new_tokens=16, temperature=1.0, seed=4))
        want = run({"target": ToyLayers(8, seed=3)}, request)[0].ctx.output
        assert run({"target": model}, request, preempt=steps)[0].ctx.output == want
        assert (len(PROMPT), tuple(range(1, 4))) not in model.ran[1:3]


def test_texts_in_pieces_run_apart_from_early_layers() -> None:
    """Jobs of other layers never share a forward, and nobody starves."""
    model = Counting(8, seed=3)
    sampling = Sampling(max_new_tokens=12)
    strategy = Speculative(Layerskip(1, 2), nodes=8)
    texts = [[1, 2, 3, 4, 5, 6, 7, 0] * 4, [1], [2, 2]]
    requests = [Request(text, strategy, sampling, tenant=str(text[:2])) for text in texts]
    lives = run({"target": model}, *requests, Request([1], Plain(), sampling), chunk=3)
    for live, text in zip(lives, [*texts, [1]], strict=True):
        plain = run({"target": model}, Request(text, Plain(), sampling))[0]
        assert live.ctx.output == plain.ctx.output


class Slip:
    """`resumed`, with what it hands on spoilt."""

    def __init__(self, kind: str):
        self.kind = kind
        self.right = plan.resume_ask

    def __call__(self, ask: Ask, before: Sequence[int], scratch: Any) -> Ask:
        ask = self.right(ask, before, scratch)
        if ask.states is not None and ask.layers is not None:
            if self.kind == "states of another token":
                ask.states = ask.states.roll(1, 0)
            elif self.kind == "a layer left out":
                ask.layers = ask.layers[1:]
            elif self.kind == "a layer twice":
                ask.layers = (ask.layers[0] - 1, *ask.layers)
        return ask


@pytest.mark.parametrize("kind", ["states of another token", "a layer left out", "a layer twice"])
def test_slips_are_caught(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = laws.build("layerskip:length=2")
    monkeypatch.setattr("foretell.cache.cache.resume_ask", Slip(kind))
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(strategy, "plain", tokens=2)


def test_an_exit_that_the_model_lacks_is_refused() -> None:
    for model, fields, line in (
        (ToyLayers(8), {"exit_layer": 4}, r"exit_layer=4.*to 3 for this model"),
        (Decoder(tiny("llama", num_hidden_layers=1), "one"), {}, "one has 1 layer"),
    ):
        request = Request([1], Speculative(Layerskip(**fields)), Sampling(max_new_tokens=4))
        with pytest.raises(BadConfig, match=line):
            run({"target": model}, request)
    with pytest.raises(Unsupported, match="layers"):
        run({"target": Toy(8)}, Request([1], Speculative(Layerskip()), Sampling()))


def test_best_tokens_draw_nothing_and_leave_a_seed_its_tokens() -> None:
    strategy = laws.build("layerskip:exit_layer=2,length=2,best=yes")
    assert isinstance(strategy, Speculative) and not strategy.drafter.draws
    laws.check_seeds(strategy)
    laws.check_law(strategy, "top-p", 2)
