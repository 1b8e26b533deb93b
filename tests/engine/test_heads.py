"""Drafters whose own models read the target's hidden states, as EAGLE's do.

Two users: the toys' head, whose rows are hashes of all that a node saw, and a small real head on a
transformer. Their cache rows must always be those of the text's true states.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from foretell.backends.graphs import GraphsBackend
from foretell.backends.onnxruntime import OnnxRuntimeBackend
from foretell.backends.openvino import OpenVinoBackend
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.states import TappedStates
from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.model import STEP, Model, forest_attention
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import add_drawn
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy, ToyHead, ToyRecurrent, feature_hash
from tests import laws
from tests.cache.users import by_chunks, run
from tests.models.decoder.families import tiny

PROMPT = [1, 2, 3, 1, 2]
TEXT = [(11 * i + i * i) % 90 for i in range(21)]


@dataclass(frozen=True)
class Eagle(Drafter):
    """A chain by a head of its own; `second`: each node has a sibling, the second best."""

    length: int = 3
    second: bool = False
    kind: str = "toy"
    drawn: bool = False
    models = ("head",)

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.drawn

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return self.drawn

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        target = models["target"]
        if self.kind == "toy":
            return {"head": ToyHead(target.vocab, seed=3, noise=0.4)}
        assert isinstance(target, Decoder)
        return {"head": EagleHead(target)}

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tap = ctx.models["head"].layers  # type: ignore[attr-defined]
        tree = TokenTree(ctx.tokens[-1])
        estimates: list[torch.Tensor] = []  # of the target's state before each drafted node
        last = 0
        for depth in range(min(self.length, ctx.depth)):
            features = torch.stack(estimates) if estimates else None
            reply = yield Ask(tree, "head", ctx.branch, rows=[last], taps=(tap,), features=features)
            assert len(reply.new) == len(reply.hidden[tap]) and reply.nodes == [last]
            estimate = reply.hidden[tap][reply.new.index(last)]
            row = reply.logits[0]
            if self.drawn:
                output = [*ctx.output, *tree.tokens_to(last)]
                q = ctx.sampler.law(row, output)
                token = ctx.rng.sample(q, "draft", len(ctx.output), depth + 1)
                last = add_drawn(tree, last, Law(q), [token], "head")[0]
                estimates.append(estimate)
                if token in ctx.sampler.stops:
                    break
                continue
            best, other = row.topk(2).indices.tolist()
            parent = last
            if self.second:
                tree.add(parent, other)
                estimates.append(estimate)
            last = tree.add(parent, best)
            estimates.append(estimate)
        return tree


class EagleHead(Model):
    """EAGLE-1's head (arXiv 2401.15077): one attention layer over fc(embedding, feature)."""

    layers = 1
    caps = Model.caps | {"taps"}
    feeds = (2,)

    def __init__(self, target: Decoder):
        assert target.loop is not None
        self.target, self.loop = target, target.loop
        self.name, self.vocab, self.context = "eagle", target.vocab, target.context
        self.heads = target.config.num_attention_heads
        self.size = target.config.head_dim
        width = self.heads * self.size
        self.layout = ((self.heads, self.size, self.size),)
        self.dtype, self.device = target.dtype, target.device
        torch.manual_seed(1)
        self.fc = nn.Linear(2 * width, width).to(self.dtype).requires_grad_(False)
        with torch.no_grad():  # near the feature, so that it drafts well at times
            self.fc.weight.mul_(0.2)
            self.fc.weight[:, width:] += torch.eye(width, dtype=self.dtype)
        self.qkv = nn.Linear(width, 3 * width).to(self.dtype).requires_grad_(False)

    def entering(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat([self.loop.embedded(ids), features.to(self.dtype)], -1))

    def keys(self, h: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v (heads, n, D), turned by their positions."""
        cos, sin = self.loop.rotary(h[None], positions)
        parts = self.qkv(h).view(len(h), 3, self.heads, self.size).permute(1, 2, 0, 3)
        q, k = (part * cos + half_turned(part) * sin for part in parts[:2])
        return q, k, parts[2]

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        given = [job.features for job in STEP.get()]
        h = self.entering(ids[0], torch.cat([part for part in given if part is not None]))
        q, k, v = self.keys(h, positions)
        h = h + 0.1 * forest_attention(0, q, k, v).reshape(len(h), -1)
        return self.loop.logits(h[rows.long()]), dict.fromkeys(taps, h)


def half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


# --- the worlds, and what the head's rows must be


@cache
def llama(dtype: torch.dtype = torch.float64) -> Decoder:
    return Decoder(tiny("llama", dtype=dtype), "llama")


def toys() -> dict[str, Model]:
    return {"target": Toy(8, seed=3, copy=1.0)}


@torch.inference_mode()
def true_states(model: Any, text: Sequence[int]) -> torch.Tensor:
    """(n, E) of the target at tap 2, from an empty cache."""
    if isinstance(model, Decoder):
        out = model.hf(torch.tensor([list(text)]), output_hidden_states=True)
        return out.hidden_states[2][0]  # type: ignore[no-any-return]
    job, _ = model.cache().prepare(Ask(TokenTree(text[-1]), taps=(2,)), text, 999)
    return model.forward([job])[0].hidden[2]  # type: ignore[no-any-return]


@torch.inference_mode()
def check_rows(head: Any, target: Any, held: Cache, text: Sequence[int]) -> int:
    """The head's rows of `text` are those of the true states; returns how many it has."""
    held = held.fork()
    held.commit(text)
    count = held.length
    assert count <= len(text) - 1
    states = true_states(target, text)
    features = torch.cat([torch.zeros_like(states[:1]), states[:-1]])[:count]
    tokens = torch.tensor(text[:count])
    places = torch.arange(count)
    if isinstance(head, ToyHead):
        hashes = torch.from_numpy(feature_hash(features.numpy()))
        assert held.k[1][0, :count, 0].tolist() == tokens.tolist()
        rows = held.v[1][0, :count]
        assert rows[:, 0].tolist() == places.tolist()
        assert rows[:, 1].tolist() == hashes.tolist(), "rows of other features"
    elif count:
        _, k, v = head.keys(head.entering(tokens, features), places[None])
        assert torch.allclose(held.k[0][:, :count], k, atol=1e-9), "rows of other features"
        assert torch.allclose(held.v[0][:, :count], v, atol=1e-9)
    held.drop()
    return count


def checked_run(models: Any, *requests: Request, chunk: int = 512) -> list[Live]:
    """Runs them, and looks at the head's rows after every step."""
    engine = Engine(models, plan=by_chunks(chunk))
    lives = [engine.add(request) for request in requests]
    most = 0
    while engine.live:
        engine.step()
        for live in engine.live:
            held = live.caches.get(("head", 0))
            if held is not None:
                head = live.ctx.models["head"]
                most = max(most, check_rows(head, models["target"], held, live.ctx.tokens))
    laws.finish(engine, *lives)
    assert most > max(len(request.prompt) for request in requests), "it kept hardly any rows"
    return lives


WORLDS: dict[str, Any] = {
    "toy": (toys, PROMPT, "toy"),
    "llama": (lambda: {"target": llama()}, TEXT, "llama"),
}
worlds = pytest.mark.parametrize("world", WORLDS)
SAMPLINGS = [Sampling(max_new_tokens=24), Sampling(max_new_tokens=24, temperature=0.8, seed=2)]


# --- laws


@worlds
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_a_head_drafts_and_its_rows_are_of_true_states(
    world: str, second: bool, chunk: int
) -> None:
    make, prompt, kind = WORLDS[world]
    models = make()
    strategy = Speculative(Eagle(3, second, kind), nodes=8)
    for sampling in SAMPLINGS:
        plain = run(models, Request(prompt, Plain(), sampling))[0].ctx.output
        live = checked_run(models, Request(prompt, strategy, sampling), chunk=chunk)[0]
        assert live.ctx.output == plain
        stats = live.ctx.stats
        assert stats.accepted < stats.drafted
        assert stats.accepted or (kind == "llama" and not second)
        whole = run(models, Request(prompt, strategy, sampling))[0].ctx.stats
        assert (stats.drafted, stats.accepted) == (whole.drafted, whole.accepted), (
            "a prompt in chunks drafts as a short one does"
        )


@worlds
@pytest.mark.parametrize("count", [1, 2])
def test_the_shortest_prompts(world: str, count: int) -> None:
    """Before the first token there are no states, which zeros stand for."""
    make, prompt, kind = WORLDS[world]
    models = make()
    strategy = Speculative(Eagle(3, True, kind), nodes=8)
    request = Request(prompt[:count], strategy, SAMPLINGS[0])
    plain = run(models, Request(prompt[:count], Plain(), SAMPLINGS[0]))[0].ctx.output
    assert checked_run(models, request)[0].ctx.output == plain


@worlds
def test_batches_equal_alone(world: str) -> None:
    make, prompt, kind = WORLDS[world]
    models = make()
    requests = []
    for i in range(4):
        strategy = Speculative(Eagle(2 + i % 2, i > 1, kind), nodes=8)
        text = prompt[: len(prompt) - i]
        requests.append(Request(text, strategy, SAMPLINGS[i % 2], tenant=str(i)))
    requests.append(Request(prompt, Plain(), SAMPLINGS[1], tenant="plain"))
    alone = [run(models, request)[0].ctx.output for request in requests]
    assert [live.ctx.output for live in run(models, *requests)] == alone
    assert [live.ctx.output for live in run(models, *requests, chunk=2)] == alone


@pytest.mark.parametrize("name", ["plain", "temperature", "penalties", "end"])
@pytest.mark.parametrize("drafter", [Eagle(2), Eagle(2, True), Eagle(2, drawn=True)])
def test_the_law_is_that_of_plain_decoding(name: str, drafter: Eagle) -> None:
    strategy = Speculative(drafter, nodes=6)
    setting = laws.SETTINGS[name]
    sampling = replace(setting.sampling, max_new_tokens=2)
    setting = replace(setting, sampling=sampling)
    models: dict[str, Model] = {"target": Toy(3, seed=3, copy=0.5)}
    law = laws.enumerate_law(strategy, laws.PROMPT, setting, models)
    assert law.drafted
    reference = laws.reference(models["target"], laws.PROMPT, setting)  # type: ignore[arg-type]
    assert law.distance(reference) <= laws.EXACT


@worlds
def test_closing_early_leaves_no_rows_of_estimates(world: str) -> None:
    make, prompt, kind = WORLDS[world]
    strategy = Speculative(Eagle(3, True, kind), nodes=8)
    for count in range(1, 14):
        models = make()
        engine = Engine(models)
        live = engine.add(Request(prompt, strategy, SAMPLINGS[0]))
        for _ in range(count):
            engine.step()
        caches, text = dict(live.caches), list(live.ctx.tokens)
        head = live.ctx.models["head"]
        engine.end(live)
        assert not live.caches and all(held.sharers == [0] for held in caches.values())
        if ("head", 0) in caches:
            held = caches["head", 0]
            held.sharers[0] = 1
            check_rows(head, models["target"], held, text)


@torch.inference_mode()
@pytest.mark.parametrize("world", WORLDS)
def test_two_hundred_random_rounds(world: str) -> None:
    """Trees of any shape, any part of them accepted, texts that come in pieces, interruptions."""
    make, prompt, kind = WORLDS[world]
    models = make()
    target = models["target"]
    head: Any = Eagle(kind=kind).bring(models)["head"]
    vocab = min(target.vocab, 90)
    draw = random.Random(0)
    for _ in range(4):
        text = list(prompt)
        above = target.cache()
        above.states = TappedStates(head.feeds)
        held = head.cache(None, above)
        for _ in range(50 if kind == "toy" else 20):
            chunk = draw.randint(1, 6)
            above.commit(text)
            if len(text) - 1 > above.length:
                answered(target, above, Ask(TokenTree(text[-1]), rows=()), text, chunk)
                above.commit(text)
            tree = TokenTree(text[-1])
            for _ in range(draw.randint(0, 3)):
                for _ in range(draw.randint(1, 2)):
                    tree.add(draw.randrange(len(tree)), draw.randrange(vocab))
                features = torch.rand(len(tree) - 1, 2 if kind == "toy" else 32)
                ask = Ask(tree, features=features.double())
                if draw.random() < 0.2:
                    held.prepare(ask, text, chunk)  # interrupted before its forward
                else:
                    answered(head, held, ask, text, chunk)
            if draw.random() < 0.8:
                answered(target, above, Ask(tree), text, chunk)
            path = tree.tokens_to(draw.randrange(len(tree)))
            text += [*path[: draw.randint(0, len(path))], draw.randrange(vocab)]
            check_rows(head, target, held, text)
            if len(text) > 100:
                break


def answered(model: Any, held: Cache, ask: Ask, text: Sequence[int], chunk: int) -> Any:
    whole = False
    while not whole:
        job, whole = held.prepare(ask, text, chunk)
        reply = model.forward([job])[0]
    return reply


# --- what a reply's hidden states are of


@dataclass(frozen=True)
class Watching(Drafter):
    """Wants the target's states of every step."""

    taps = (2,)

    def start(self, ctx: Context) -> list[torch.Tensor]:
        return []

    def propose(self, ctx: Context, state: Any, budget: int) -> TokenTree:
        tree = TokenTree(ctx.tokens[-1])
        return tree.chain([1, 2][: ctx.depth]).chain([3, 1][: ctx.depth]) if ctx.depth else tree

    def observe(self, ctx: Context, state: Any, step: Feedback) -> None:
        reply = step.reply
        assert len(reply.new) == len(reply.hidden[2])
        before = len(ctx.tokens) - len(step.tokens)
        text = ctx.tokens[:before]
        target = ctx.models["target"]
        for node, state_ in zip(reply.new, reply.hidden[2], strict=True):
            path = step.tree.tokens_to(node) if node >= 0 else []
            seen = [*text, *path] if node >= 0 else text[: before + node]
            want = true_states(target, seen)[-1]
            assert float((state_ - want).abs().max()) <= 1e-6


@worlds
def test_a_reply_says_which_nodes_its_hidden_states_are_of(world: str) -> None:
    make, prompt, _ = WORLDS[world]
    models = make()
    for chunk in (3, 512):
        request = Request(prompt, Speculative(Watching(), nodes=8), SAMPLINGS[0])
        plain = run(models, Request(prompt, Plain(), SAMPLINGS[0]))[0].ctx.output
        assert run(models, request, chunk=chunk)[0].ctx.output == plain


# --- backends give the states


def missing(*names: str) -> bool:
    return any(importlib.util.find_spec(name) is None for name in names)


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (partial(GraphsBackend, record=None), ()),
        (OpenVinoBackend, ("openvino",)),
        (OnnxRuntimeBackend, ("onnx", "onnxruntime")),
    ],
    ids=["graphs", "openvino", "onnxruntime"],
)
def test_a_head_does_not_throw_steps_back_to_torch(make: Any, needs: tuple[str, ...]) -> None:
    if missing(*needs):
        pytest.skip(f"{' and '.join(needs)} not installed")
    hf = partial(tiny, "llama", num_attention_heads=2, num_key_value_heads=1)
    slow, quick = Decoder(hf(), "slow", fused_blocks), Decoder(hf(), "quick", fused_blocks)
    quick.use(make)
    strategy = Speculative(Eagle(3, True, "llama"), nodes=8)
    request = Request(TEXT, strategy, SAMPLINGS[0])
    want = run({"target": slow}, request)[0].ctx
    by = []
    forward = quick.forward

    def noted(jobs: Sequence[Job]) -> Any:
        replies = forward(jobs)
        by.append(quick.computed_by)
        return replies

    quick.forward = noted  # type: ignore[method-assign]
    got = run({"target": quick}, request)[0].ctx
    assert got.output == want.output and got.stats.accepted == want.stats.accepted > 0
    assert quick.backend is not None and set(by) == {quick.backend.name}


# --- slips


def rows_break(world: str) -> None:
    make, prompt, kind = WORLDS[world]
    strategy = Speculative(Eagle(3, True, kind), nodes=8)
    with pytest.raises(AssertionError, match="rows of other features"):
        checked_run(make(), Request(prompt, strategy, SAMPLINGS[0]))


@worlds
def test_kept_rows_of_estimates_are_caught(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Cache.finish

    def trusting(self: Cache, job: Job, *hidden: Any) -> None:
        finish(self, job, *hidden)
        self.trusted = len(self.tokens)

    monkeypatch.setattr(Cache, "finish", trusting)
    rows_break(world)


@worlds
def test_shifted_features_are_caught(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = TappedStates.read_states

    def shifted(self: TappedStates, taps: Any, start: int, end: int) -> torch.Tensor:
        return read(self, taps, start - 1, end - 1)

    monkeypatch.setattr(TappedStates, "read_states", shifted)
    rows_break(world)


@worlds
def test_missing_features_of_the_prompt_are_caught(
    world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TappedStates.read_states
    _, prompt, _ = WORLDS[world]

    def bare(self: TappedStates, taps: Any, start: int, end: int) -> torch.Tensor:
        rows = read(self, taps, start, end).clone()
        rows[: max(0, len(prompt) - 2 - start)] = 0
        return rows

    monkeypatch.setattr(TappedStates, "read_states", bare)
    rows_break(world)


def test_a_draft_without_features_of_its_nodes_is_an_error() -> None:
    models = toys()
    head = ToyHead(8, seed=3)
    above = models["target"].cache()
    above.states = TappedStates((2,))
    with torch.inference_mode():
        answered(models["target"], above, Ask(TokenTree(2), rows=()), PROMPT, 99)
        above.commit(PROMPT)
        held = head.cache(None, above)
        with pytest.raises(AssertionError, match=r"states of these tokens|need `features`"):
            held.prepare(Ask(TokenTree(2).chain([1, 2])), PROMPT, 99)


@worlds
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_preempted_heads_wait_for_their_targets_states(world: str, at: int) -> None:
    """Among others, so that some of their asks are open when their rows are given up."""
    make, prompt, kind = WORLDS[world]
    requests = []
    for i in range(4):
        strategy = Speculative(Eagle(1 + i, True, kind), nodes=8)
        text = prompt[: 5 - i]
        requests.append(Request(text, strategy, SAMPLINGS[i % 2], tenant=str(i)))
    alone = [run(make(), request)[0].ctx.output for request in requests]
    for chunk in (2, 512):
        lives = run(make(), *requests, preempt=at, chunk=chunk)
        assert [live.ctx.output for live in lives] == alone


def test_a_head_on_a_model_without_states_is_refused() -> None:
    request = Request(PROMPT, Speculative(Eagle(), nodes=8), SAMPLINGS[0], name="eagle")
    with pytest.raises(Unsupported, match=r"eagle cannot run on recurrent: it needs hidden states"):
        Engine({"target": ToyRecurrent(8)}).add(request)
