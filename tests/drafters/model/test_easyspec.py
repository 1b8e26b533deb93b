"""Drafts with parallel attention: what a group computes, and that no rough row outlives its draft;
the law of the output is in test_laws.py.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model.trimming import NEVER, Trimmed, trim_head
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import Unsupported
from foretell.models.decoder import parallel
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws, tiny

SPECS = ["easyspec:drafts=2,length=2", "easyspec:length=3,group=1"]
TEXT = [5, 9, 13, 5, 9, 40, 2]


@cache
def draft(layers: int = 6) -> Decoder:
    return Decoder(tiny.relative(tiny.llama(num_hidden_layers=layers)), "draft", fused_blocks)


@cache
def target() -> Decoder:
    return Decoder(tiny.llama(num_hidden_layers=6), "tiny", fused_blocks)


def run(spec: str, count: int = 24, **options: Any) -> Live:
    setting = laws.Setting(Sampling(max_new_tokens=count, **options))
    made: dict[str, Model] = {"target": target(), "draft": draft()}
    return laws.generate(laws.build(spec, nodes=8), TEXT, setting, made)


@torch.inference_mode()
def drafted(model: Model, tokens: list[int]) -> torch.Tensor:
    """Rows (n, V) of these tokens below the text, asked for one by one, as a chain is drafted."""
    cache = model.cache()
    tree = TokenTree(TEXT[-1])
    rows = []
    for token in [*tokens, -1]:
        job, _ = cache.prepare(Ask(tree, rows=[len(tree) - 1]), TEXT, 512)
        rows.append(model.forward([job])[0].logits[0])
        tree.add(len(tree) - 1, token)
    return torch.stack(rows)


# --- the forward of a group


@torch.inference_mode()
def by_hand(tokens: list[int], size: int) -> torch.Tensor:
    """The same rows by transformers' own modules and plain loops."""
    hf = draft().hf
    body: Any = hf.model
    rows = []
    keys: list[Any] = [[] for _ in body.layers]
    text = [*TEXT, *tokens]
    for place, token in enumerate(text):
        at = torch.tensor([[place]])
        h = body.embed_tokens(torch.tensor([[token]]))
        cos, sin = body.rotary_emb(h, at)
        rough = place >= len(TEXT)
        layers = list(enumerate(body.layers))
        middle = layers[1:-1]
        groups = [middle[i : i + size] for i in range(0, len(middle), size)]
        for group in [layers[:1], *groups, layers[-1:]]:
            entering = h
            for i, layer in group:
                read = entering if rough else h
                h = h + attention(layer, read, cos, sin, keys[i])
                h = h + layer.mlp(layer.post_attention_layernorm(h))
        rows.append(hf.lm_head(body.norm(h))[0, 0])
    return torch.stack(rows[len(TEXT) - 1 :])


def attention(layer: Any, h: torch.Tensor, cos: Any, sin: Any, kept: list[Any]) -> torch.Tensor:
    """What one token's attention says, in plain products; its key and value are kept."""
    own, x = layer.self_attn, layer.input_layernorm(h)[0]
    width = own.head_dim

    def turned(heads: torch.Tensor) -> torch.Tensor:
        half = width // 2
        swapped = torch.cat([-heads[..., half:], heads[..., :half]], -1)
        return heads * cos[0] + swapped * sin[0]

    q = turned(own.q_proj(x).view(-1, width))
    kept.append((turned(own.k_proj(x).view(-1, width)), own.v_proj(x).view(-1, width)))
    share = len(q) // len(kept[0][0])
    said = []
    for head in range(len(q)):
        k = torch.stack([key[head // share] for key, _ in kept])
        v = torch.stack([value[head // share] for _, value in kept])
        said.append((k @ q[head] * own.scaling).softmax(0) @ v)
    out: torch.Tensor = own.o_proj(torch.cat(said))[None, None]
    return out


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_of_a_draft_are_those_of_the_groups(size: int) -> None:
    tokens = [7, 30, 7]
    ours = drafted(draft().layer_parallel(size), tokens)
    theirs = by_hand(tokens, size)
    assert torch.allclose(ours, theirs, atol=1e-4 * float(theirs.abs().max()))


def test_groups_of_one_are_the_draft_model_to_the_last_bit() -> None:
    tokens = [7, 30, 7, 2]
    ordinary = drafted(draft(), tokens)
    assert torch.equal(drafted(draft().layer_parallel(1), tokens), ordinary)
    rough = drafted(draft().layer_parallel(4), tokens)
    assert torch.equal(rough[0], ordinary[0]), "the root is computed in the ordinary way"
    assert not torch.allclose(rough[1], ordinary[1], atol=1e-3)
    for temperature in (0.0, 1.0):
        one = run("easyspec:length=3,group=1", temperature=temperature)
        usual = run("draft:length=3", temperature=temperature)
        assert one.ctx.output == usual.ctx.output
        assert one.ctx.stats.accepted == usual.ctx.stats.accepted


def test_the_first_layer_and_the_last_one_stand_alone() -> None:
    loop = draft().loop
    assert loop is not None
    for size, kinds in ((2, "FGTGTF"), (3, "FGTTGF"), (4, "FGTTTF"), (9, "FGTTTF")):
        assert (
            "".join(type(b).__name__[0] for b in parallel.group_layers(loop, size).blocks) == kinds
        )
    short = draft(2).loop
    assert short is not None
    assert [type(b) for b in parallel.group_layers(short, 4).blocks] == [
        type(b) for b in short.blocks
    ]


# --- what is kept


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_row_of_a_rough_forward_is_ever_kept(temperature: float) -> None:
    made: dict[str, Model] = {"target": target(), "draft": draft()}
    engine = Engine(made)
    strategy = laws.build("easyspec:length=3", nodes=8)
    sampling = Sampling(max_new_tokens=16, temperature=temperature)
    live = engine.add(Request(TEXT, strategy, sampling))
    checked = 0
    while engine.live:
        engine.step()
        held = live.caches.get(("easyspec", 0))
        if held is not None and held.length:
            fresh = exact_rows(live.ctx.tokens[: held.length])
            for layer, keys in enumerate(held.k):
                assert torch.allclose(keys[:, : held.length], fresh[layer], atol=1e-4)
            checked += 1
    assert checked > 5 and live.ctx.stats.accepted


@torch.inference_mode()
def exact_rows(tokens: list[int]) -> list[torch.Tensor]:
    """The keys of each layer that an ordinary forward of the draft model writes."""
    cache = draft().cache()
    job, _ = cache.prepare(Ask(TokenTree(0), rows=()), [*tokens, 0], 512)
    draft().forward([job])
    return [keys[:, : len(tokens)] for keys in cache.k]


def test_rough_rows_that_are_kept_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = laws.build("easyspec:length=3", nodes=8)
    laws.check_close(strategy, 0.0)
    monkeypatch.setattr("foretell.testing.toy.distrust_drafts", lambda job: None)
    with pytest.raises(AssertionError, match="stale rows in the cache"):
        laws.check_close(strategy, 0.0)


def test_a_law_that_is_not_the_rough_models_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip: q from the ordinary forward, which calibrates the cache."""
    strategy = laws.build("easyspec:length=2", nodes=8)
    laws.check_law(strategy, "plain", tokens=3)
    rows = Toy.score

    def exact(ctx: Any, tree: TokenTree, node: int, row: Any, *more: Any) -> Any:
        found = drawn(ctx, tree, node, row, *more)
        other = rows(ctx.models["draft"], ctx.tokens, tree)[node]
        tree.laws[found[0]] = type(tree.laws[found[0]])(ctx.sampler.law(other, ()))
        return found

    from foretell.drafters.model import chains

    drawn = chains.continue_chains
    monkeypatch.setattr(chains, "continue_chains", exact)
    with pytest.raises(AssertionError, match="off by"):
        laws.check_law(strategy, "plain", tokens=3)


# --- a draft model whose head is trimmed

KEPT = [token for token in range(330) if token % 13]


@cache
def trimmed() -> Trimmed:
    hf = copy.deepcopy(draft().hf)
    return trim_head(Decoder(hf, "draft", fused_blocks), KEPT)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_trimmed_head_gives_the_rows_of_what_it_keeps(size: int) -> None:
    tokens = [7, 30, 7]
    rough = trimmed().layer_parallel(size)
    rows, whole = drafted(rough, tokens), drafted(draft().layer_parallel(size), tokens)
    assert rough.name == f"draft[groups of {size}][{len(KEPT)} of {rough.vocab} tokens]"
    assert rows.shape == whole.shape
    assert torch.allclose(rows[:, KEPT], whole[:, KEPT], atol=1e-5)
    left_out = sorted({*range(rough.vocab)} - {*KEPT})
    assert bool((rows[:, left_out] == NEVER).all())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trimmed_draft_model_keeps_no_rough_row(temperature: float) -> None:
    engine = Engine({"target": target(), "draft": trimmed()})
    sampling = Sampling(max_new_tokens=16, temperature=temperature)
    live = engine.add(Request(TEXT, laws.build("easyspec:length=3", nodes=8), sampling))
    checked = 0
    while engine.live:
        engine.step()
        held = live.caches.get(("easyspec", 0))
        if held is not None and held.length:
            fresh = exact_rows(live.ctx.tokens[: held.length])
            for layer, keys in enumerate(held.k):
                assert torch.allclose(keys[:, : held.length], fresh[layer], atol=1e-4)
            checked += 1
    assert checked > 5 and live.ctx.stats.accepted


def test_greedy_tokens_do_not_hang_on_a_trimmed_head() -> None:
    plain = run("plain")
    made: dict[str, Model] = {"target": target(), "draft": trimmed()}
    setting = laws.Setting(Sampling(max_new_tokens=24))
    for size in (1, 2, 4):
        spec = f"easyspec:length=3,group={size}"
        live = laws.generate(laws.build(spec, nodes=8), TEXT, setting, made)
        assert live.ctx.output == plain.ctx.output and live.ctx.stats.accepted


def test_a_trimmed_model_whose_layers_cannot_be_taken_apart_is_refused_by_name() -> None:
    stock = trim_head(Decoder(copy.deepcopy(draft().hf), "stock"), KEPT)
    other = ToyRecurrent(330)
    alone = Trimmed(other, range(330), 330)
    for model in (stock, alone):
        with pytest.raises(Unsupported, match=r"easyspec cannot run on .* attention"):
            Engine({"target": target(), "draft": model}).add(
                Request(TEXT, laws.build("easyspec"), Sampling())
            )


# --- the whole


def test_greedy_tokens_do_not_hang_on_the_size_of_a_group() -> None:
    plain = run("plain")
    for size in (1, 2, 4):
        live = run(f"easyspec:length=3,group={size}")
        assert live.ctx.output == plain.ctx.output and live.ctx.stats.accepted


def test_rough_and_ordinary_jobs_share_a_forward() -> None:
    """One request drafts while the other begins a draft: each has the rows it has alone."""
    made: dict[str, Model] = {"target": target(), "draft": draft()}
    engine = Engine(made)
    lives = []
    for length in (2, 3, 5):
        strategy = laws.build(f"easyspec:length={length}", nodes=8)
        lives.append(engine.add(Request(TEXT[length:], strategy, Sampling(max_new_tokens=14))))
        engine.step()
    laws.finish(engine, *lives)
    for length, live in zip((2, 3, 5), lives, strict=True):
        setting = laws.Setting(Sampling(max_new_tokens=14))
        assert (
            live.ctx.output
            == laws.generate(laws.build("plain"), TEXT[length:], setting, made).ctx.output
        )


def test_models_whose_layers_cannot_be_taken_apart_are_refused_by_name() -> None:
    stock = Decoder(tiny.llama(), "stock")
    for other in (ToyRecurrent(330), stock):
        with pytest.raises(Unsupported, match=r"easyspec cannot run on .* attention"):
            Engine({"target": target(), "draft": other}).add(
                Request(TEXT, laws.build("easyspec"), Sampling())
            )
    assert isinstance(Toy(8).layer_parallel(4), Toy)
