"""What a request brings beside its prompt, biases in attention, and a cache that sees both ways.

Three models written here: a toy that reads an encoder's tokens, a small decoder with ALiBi, and the
same without it for a canvas of tokens that all see each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.policy import Segment
from foretell.cache.states import NO_STATES
from foretell.core.model import STEP, Model, forest_attention
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.cache.users import EVERY, Evictor, evicted_sight, run

PROMPT = [1, 2, 3, 1, 2, 3, 1]
SPECS = ("plain", "suffix", "token-recycling", "draft:drafts=3")
SAMPLINGS = [Sampling(max_new_tokens=20), Sampling(max_new_tokens=20, temperature=0.8, seed=3)]

# --- inputs: an encoder's rows


class Translator(Toy):
    """A toy whose nodes see an encoder's rows too: the tokens of `inputs["source"]`.

    Its attention adds them in front, at positions below 0.
    """

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        self.sources = {}
        for job in STEP.get():
            self.sources[job] = list(job.cache.inputs.get("source", ()))
        return super().run(ids, positions, rows, *rest)

    def _node_values(self, job: Job, positions: torch.Tensor) -> torch.Tensor:
        self.source = self.sources[job]
        return positions

    def _row_logits(self, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        count = len(self.source)
        before = np.array([[position] for position in range(-count, 0)]).reshape(-1, 1)
        seen_tokens = np.concatenate([np.array(self.source, dtype=np.float64), tokens])
        seen = np.concatenate([before.astype(np.float64), values])
        return self.row(seen_tokens, seen[:, 0] + 1000)


def translate(prompt: Sequence[int], source: Sequence[int], count: int) -> list[int]:
    """Greedy, from rows asked of the toy's hash alone."""
    toy = Translator(8, seed=3, copy=0.3)
    text = list(prompt)
    for _ in range(count):
        tokens = np.array([*source, *text], dtype=np.float64)
        places = np.arange(-len(source), len(text), dtype=np.float64) + 1000
        text.append(int(toy.row(tokens, places).argmax()))
    return text[len(prompt) :]


def translators() -> dict[str, Model]:
    near = Translator(8, seed=3, noise=0.6, copy=0.3)
    return {"target": Translator(8, seed=3, copy=0.3), "draft": near}


@pytest.mark.parametrize("spec", SPECS)
def test_inputs_reach_every_cache_of_the_request(spec: str) -> None:
    sources = ([4, 5], [6], [])
    requests = []
    for i, source in enumerate(sources):
        inputs = {"source": source}
        strategy = laws.build(spec)
        requests.append(Request(PROMPT, strategy, SAMPLINGS[0], tenant=str(i), inputs=inputs))
    wanted = [translate(PROMPT, source, 20) for source in sources]
    assert len({tuple(output) for output in wanted}) == 3, "the source has no say"
    for options in ({}, {"chunk": 2}, {"preempt": 5}):
        lives = run(translators(), *requests, **options)
        assert [live.ctx.output for live in lives] == wanted
    plain = Request(PROMPT, Plain(), SAMPLINGS[1], inputs=requests[0].inputs)
    if not spec.startswith("draft"):
        sampled = Request(PROMPT, laws.build(spec), SAMPLINGS[1], inputs=requests[0].inputs)
        texts = [run(translators(), request)[0].ctx.output for request in (plain, sampled)]
        assert texts[0] == texts[1]


def test_lost_inputs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip: a model that makes its cache without asking what the request brings."""

    def bare(self: Model, request: Any = None, beside: Any = None) -> Cache:
        return Cache(self.layout, self.dtype, self.device)

    monkeypatch.setattr(Model, "cache", bare)
    request = Request(PROMPT, Plain(), SAMPLINGS[0], inputs={"source": [4, 5]})
    assert run(translators(), request)[0].ctx.output != translate(PROMPT, [4, 5], 20)


def test_forks_and_forgotten_caches_keep_their_inputs() -> None:
    inputs = {"source": [4, 5]}
    held = translators()["target"].cache(Request(PROMPT, Plain(), inputs=inputs))
    assert held.inputs is inputs and held.fork().inputs is inputs
    held.forget()
    assert held.inputs is inputs


# --- a bias by position

HEADS, GROUPS, SIZE, WIDTH, VOCAB = 4, 2, 8, 32, 23


def alibi(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """(heads, n, rows): further back counts less, in each head by another slope."""
    distance = (here[:, None] - there[None, :]).double()
    slopes = torch.tensor([2.0 ** -(head + 1) for head in range(HEADS)], dtype=torch.float64)
    return -slopes[:, None, None] * distance


class Small(Model):
    """A decoder of two layers, float64, whose attention tells positions apart by ALiBi alone."""

    layers = 2

    def __init__(self, bias: Any = alibi, name: str = "small", noise: float = 0.0):
        self.name, self.vocab, self.context = name, VOCAB, 512
        self.bias = bias
        self.layout = ((GROUPS, SIZE, SIZE),) * self.layers
        self.dtype, self.device = torch.float64, torch.device("cpu")
        torch.manual_seed(0)
        sizes = (HEADS + 2 * GROUPS) * SIZE
        made = [nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)]
        for _ in range(self.layers):
            made += [nn.Linear(WIDTH, sizes), nn.Linear(HEADS * SIZE, WIDTH)]
        self.modules = [module.double().requires_grad_(False) for module in made]
        for module in self.modules:
            module.weight.mul_(2.5)  # type: ignore[operator]
            drawn = torch.randn(module.weight.shape, dtype=torch.float64)  # type: ignore[arg-type]
            module.weight.add_(noise * drawn)  # type: ignore[operator]

    def through(self, ids: torch.Tensor, attention: Any) -> torch.Tensor:
        """Rows (n, V) of ids (n,); `attention(layer, q, k, v)` -> (n, H, D)."""
        embed, head, *rest = self.modules
        h = embed(ids)
        for layer in range(self.layers):
            into, out = rest[2 * layer : 2 * layer + 2]
            parts = into(h).view(len(h), -1, SIZE).transpose(0, 1)
            q, k, v = parts.split([HEADS, GROUPS, GROUPS])
            h = h + out(attention(layer, q, k, v).reshape(len(h), -1)).tanh()
        return head(h)  # type: ignore[no-any-return]

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return forest_attention(layer, q, k, v, bias=self.bias)

        return self.through(ids[0], attention)[rows.long()], {}

    def by_hand(self, text: Sequence[int], sees: torch.Tensor) -> torch.Tensor:
        """Rows (n, V) of a text where token i sees what `sees` (n, n) says, in plain products."""
        places = torch.arange(len(text))
        added = torch.where(sees, 0.0, -torch.inf).double()[None]
        if self.bias is not None:
            added = added + self.bias(places, places)

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            k, v = (part.repeat_interleave(HEADS // GROUPS, 0) for part in (k, v))
            scores = q @ k.transpose(1, 2) * SIZE**-0.5 + added
            return (scores.softmax(-1) @ v).transpose(0, 1)

        return self.through(torch.tensor(list(text)), attention)


def causal(count: int) -> torch.Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


def smalls() -> dict[str, Model]:
    return {"target": Small(), "draft": Small(name="near", noise=0.05)}


TEXT = [(5 * i + i * i) % VOCAB for i in range(19)]
TREE = TokenTree(TEXT[-1]).chain([3, 4, 5]).chain([6, 7]).chain([8], at=2)


@torch.inference_mode()
def rows_of(model: Model, held: Cache, tree: TokenTree, text: Sequence[int], chunk: int) -> Any:
    whole = False
    while not whole:
        job, whole = held.prepare(Ask(tree, rows=range(len(tree))), text, chunk)
        reply = model.forward([job])[0]
    return reply.logits


@pytest.mark.parametrize("chunk", [1, 5, 99])
@torch.inference_mode()
def test_biased_trees_have_the_rows_of_their_paths(chunk: int) -> None:
    model = Small()
    got = rows_of(model, model.cache(), TREE, TEXT, chunk)
    for node, row in enumerate(got):
        text = [*TEXT, *TREE.tokens_to(node)]
        want = model.by_hand(text, causal(len(text)))[-1]
        assert float((row - want).abs().max()) <= 1e-10
        bare = Small(None).by_hand(text, causal(len(text)))[-1]
        assert float((row - bare).abs().max()) > 1e-3


@torch.inference_mode()
def test_a_bias_over_evicted_rows() -> None:
    model = Small()
    held = model.cache()
    held.use(Evictor())
    text = TEXT[: 3 * EVERY + 1]
    tree = TokenTree(text[-1]).chain([3, 4, 5]).chain([6, 7])
    got = rows_of(model, held, tree, text, 99)
    assert held.positions is not None
    for node, row in enumerate(got):
        path = [*text, *tree.tokens_to(node)]
        sees = torch.zeros(len(path), len(path), dtype=torch.bool)
        for here, seen in enumerate(evicted_sight(len(path))):
            sees[here, seen] = True
        assert float((row - model.by_hand(path, sees)[-1]).abs().max()) <= 1e-10


@torch.inference_mode()
def test_a_bias_over_shared_rows() -> None:
    model = Small()
    want = rows_of(model, model.cache(), TREE, TEXT, 99)
    first = model.cache()
    rows_of(model, first, TokenTree(TEXT[12]), TEXT[:13], 99)
    whole = first.share_rows(TEXT[:13])
    held = model.cache()
    for start, end in ((0, 5), (5, 12)):
        k, v = ([part[:, start:end] for part in parts] for parts in (whole.k, whole.v))
        assert held.adopt_segment(Segment(whole.tokens[start:end], start, k, v, {}))
    assert float((rows_of(model, held, TREE, TEXT, 3) - want).abs().max()) <= 1e-12


@pytest.mark.parametrize("spec", SPECS)
def test_drafting_on_a_biased_model(spec: str) -> None:
    models = smalls()
    for sampling in SAMPLINGS:
        if sampling.temperature and spec.startswith("draft"):
            continue
        for policy in (None, Evictor()):
            requests = [
                Request(text, laws.build(spec), sampling, tenant=str(len(text)), policy=policy)
                for text in (TEXT, TEXT[:8])
            ]
            plain = [
                run(models, Request(request.prompt, Plain(), sampling, policy=policy))[0]
                for request in requests
            ]
            lives = run(models, *requests, chunk=4)
            assert [a.ctx.output for a in lives] == [b.ctx.output for b in plain]


def test_a_bias_by_rows_and_not_positions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip: key positions taken for places in the cache, once rows were evicted."""
    monkeypatch.setattr(Cache, "row_positions", lambda self: range(self.base))
    with pytest.raises(AssertionError):
        test_a_bias_over_evicted_rows()


# --- a canvas: a block of tokens that all see each other


class Canvas(Cache):
    """Takes an ask for a block: after the text, every node sees every other one.

    Positions are those of a chain. What was computed of a block is never kept, since each of its
    rows depends on all its tokens.
    """

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        self.commit(tokens)
        job, whole = super().prepare(ask, tokens, chunk)
        if whole:
            pending = -job.first
            nodes = len(job.tokens)
            seen = torch.ones(nodes, nodes, dtype=torch.bool)
            seen[:pending] = causal(nodes)[:pending]
            job.seen = seen
        return job, whole

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        plan = self.plan
        assert plan is not None
        super().finish(hidden)
        if not plan.part:
            self.trusted = plan.pending


class Diffusing(Small):
    """Reads blocks in both directions; its last token is a mask."""

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        return self.prepare_cache(Canvas(self.layout, self.dtype, self.device), request, beside)


@pytest.mark.parametrize("chunk", [2, 99])
@torch.inference_mode()
def test_a_canvas_sees_in_both_directions(chunk: int) -> None:
    """Tokens of the block are filled in one by one, and the rows are those of full attention."""
    model = Diffusing(None)
    model.bias = lambda here, there: -(here[:, None] - there[None, :]).abs()[None].double() / 4
    held = model.cache()
    text = list(TEXT[:9])
    mask = VOCAB - 1
    for block in range(3):
        filled = [mask] * 4
        for step in range(4):
            tree = TokenTree(text[-1]).chain(filled)
            got = rows_of(model, held, tree, text, chunk)
            whole = [*text, *filled]
            sees = causal(len(whole))
            sees[len(text) - 1 :, len(text) - 1 :] = True
            want = model.by_hand(whole, sees)[len(text) - 1 :]
            # Tokens that were taken in after their block are read as any text is.
            assert float((got - want).abs().max()) <= 1e-10, (block, step)
            place = int(got[1:].amax(-1).masked_fill(torch.tensor(filled) != mask, -9e9).argmax())
            filled[place] = int(got[1 + place, :mask].argmax())
        text += filled
        assert held.length < len(text)


@torch.inference_mode()
def test_an_ordinary_cache_is_told_from_a_canvas() -> None:
    tree = TokenTree(TEXT[-1]).chain([1, 2, 3])
    one, other = Diffusing(None), Small(None)
    both = [rows_of(model, model.cache(), tree, TEXT, 99) for model in (one, other)]
    assert float((both[0] - both[1])[:-1].abs().amax(-1).min()) > 1e-3
