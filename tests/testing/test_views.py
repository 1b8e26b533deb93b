"""Views of a decoder: their rows are those of the layers run by hand, and they share all weights.

What is expected comes from transformers' own modules with masks written here, never from the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from foretell import wrap
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.engine.cost_profile import model_identity
from foretell.errors import BadConfig, Unsupported
from foretell.loading.wrap import pair_models
from foretell.models.decoder.decoder import Decoder
from foretell.testing.recording import Recording
from foretell.testing.views import Extended, Scored, Skipped, View, join_spans
from tests.models.decoder.families import VOCAB, WINDOW, tiny
from tests.models.decoder.test_families import PROMPTS, TREE, answer

FAMILIES = ("llama", "qwen2", "gemma2", "gpt_neox")  # windows, caps, scaled embeddings, biases
PROMPT = PROMPTS[1]
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def target(family: str) -> Decoder:
    """With the faster layers where the family has them."""
    model = wrap(tiny(family), name=family).models["target"]
    assert isinstance(model, Decoder)
    return model


@cache
def rows_of_ids(family: str) -> torch.Tensor:
    """What enters layer 0 for each id, (V, E), by transformers."""
    with torch.inference_mode():
        out = tiny(family)(input_ids=torch.arange(VOCAB)[None], output_hidden_states=True)
    return out.hidden_states[0][0]


@torch.inference_mode()
def last_states(family: str, h: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Normed states (n, E) of h (n, E) after these layers, each called by hand."""
    hf: Any = tiny(family)
    body = hf.get_decoder()
    count = len(h)
    distance = torch.arange(count)[:, None] - torch.arange(count)
    h = h[None]
    positions = torch.arange(count)[None]
    rotary = body.rotary_emb(h, positions)
    for i in layers:
        seen = distance >= 0
        if "sliding_attention" in (hf.config.layer_types[i : i + 1] if windowed(hf) else ()):
            seen &= distance < WINDOW
        mask = torch.where(seen, 0.0, -torch.inf)[None, None]
        out = body.layers[i](
            h, attention_mask=mask, position_ids=positions, position_embeddings=rotary
        )
        h = out[0] if isinstance(out, tuple) else out
    norm = body.norm if hasattr(body, "norm") else body.final_layer_norm
    return norm(h)[0]


def windowed(hf: Any) -> bool:
    return getattr(hf.config, "layer_types", None) is not None


@torch.inference_mode()
def expected(family: str, h: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Logits (V,) after the last of h (n, E)."""
    hf: PreTrainedModel = tiny(family)
    head: Any = hf.get_output_embeddings()
    logits = head(last_states(family, h, layers))[-1]
    cap = getattr(hf.config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def paths(tree: TokenTree) -> list[list[int]]:
    return [tree.tokens_to(node) for node in range(len(tree))]


# --- some of the layers


@families
@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 2), (0, 1, 2)])
def test_skipped_rows_are_those_of_its_layers(family: str, layers: tuple[int, ...]) -> None:
    view = Skipped(target(family), layers)
    reply = answer(view, view.cache(), Ask(TREE), PROMPT, chunk=5)
    for row, path in zip(reply.logits, paths(TREE), strict=True):
        assert_close(row, expected(family, rows_of_ids(family)[[*PROMPT, *path]], layers))


def test_what_a_skipped_model_accepted_serves_the_next_step() -> None:
    view = Skipped(target("qwen2"), (0, 2))
    rows = view.cache()
    answer(view, rows, Ask(TREE), PROMPT, chunk=5)
    text = [*PROMPT, *TREE.tokens_to(4), 9]
    reply = answer(view, rows, Ask(TokenTree(9)), text)
    assert rows.length == len(text) - 1 and view.width == 1
    assert_close(reply.logits[0], expected("qwen2", rows_of_ids("qwen2")[text], (0, 2)))


def test_taps_and_subsets_keep_the_numbers_of_the_layers() -> None:
    model = target("llama")
    view = Skipped(model, (0, 2))
    ask = Ask(TokenTree(PROMPT[-1]), taps=(0, 1, 2, 3), layers=(0, 1))
    ours = answer(view, view.cache(), ask, PROMPT)
    theirs = answer(model, model.cache(), Ask(ask.tree, taps=ask.taps, layers=(0,)), PROMPT)
    assert ours.hidden.keys() == theirs.hidden.keys() == {0, 1, 2, 3}
    for tap in ask.taps:
        assert_close(ours.hidden[tap][-1], theirs.hidden[tap][-1])


def test_skipped_models_are_named_by_their_layers() -> None:
    model = target("llama")
    assert Skipped(model, (0, 1, 2)).name == "llama[layers 0-2]"
    assert Skipped(model, [0, 2]).name == "llama[layers 0,2]"
    assert join_spans([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"


@pytest.mark.parametrize("layers", [(), (3,), (-1, 0), (1, 0), (0, 0)])
def test_layers_that_are_not_there_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(BadConfig, match="must be some of 0-2, each once and in ascending order"):
        Skipped(target("llama"), layers)


# --- ids beyond the vocabulary


def prompt_tokens(family: str, count: int = 3) -> torch.Tensor:
    like = rows_of_ids(family)
    noise = torch.randn(count, like.shape[1], generator=torch.Generator().manual_seed(2))
    return noise * like.std()


@families
def test_extended_rows_are_those_of_the_added_embeddings(family: str) -> None:
    added = prompt_tokens(family)
    view = Extended(target(family), added)
    table = torch.cat([rows_of_ids(family), added])
    tree = TokenTree(PROMPT[-1]).chain([VOCAB, VOCAB + 1, VOCAB + 2]).chain([3, VOCAB]).chain([4])
    reply = answer(view, view.cache(), Ask(tree), PROMPT, chunk=5)
    assert reply.logits.shape == (len(tree), VOCAB)
    for row, path in zip(reply.logits, paths(tree), strict=True):
        assert_close(row, expected(family, table[[*PROMPT, *path]], range(3)))
    with torch.inference_mode():
        states = view.embed([5, VOCAB + 2])
    assert torch.equal(states[1], added[2])
    assert_close(states[0], rows_of_ids(family)[5])


@torch.inference_mode()
def test_added_embeddings_are_shared_with_who_trains_them() -> None:
    added = prompt_tokens("llama")
    view = Extended(target("llama"), added)
    assert view.embeddings.data_ptr() == added.data_ptr()
    tree = TokenTree(PROMPT[-1]).chain([VOCAB])
    before = view.score(PROMPT, tree)
    added += 1
    after = view.score(PROMPT, tree)
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 31), torch.zeros(32), torch.zeros(2, 32, dtype=torch.float64)]
)
def test_embeddings_of_another_shape_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(BadConfig, match=r"embeddings: must be \(n, 32\) of torch.float32 on cpu"):
        Extended(target("llama"), wrong)


# --- scores


@families
def test_scores_are_those_of_the_head_over_the_normed_states(family: str) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2))
    view = Scored(target(family), head)
    assert view.caps == target(family).caps - {"rows"} | {"scores"} and view.row_size == 2
    reply = answer(view, view.cache(), Ask(TREE), PROMPT, chunk=5)
    assert reply.logits.shape == (len(TREE), 2)
    for row, path in zip(reply.logits, paths(TREE), strict=True):
        h = rows_of_ids(family)[[*PROMPT, *path]]
        with torch.inference_mode():
            assert_close(row, head(last_states(family, h, range(3)))[-1])
    nothing = answer(view, view.cache(), Ask(TREE, rows=[]), PROMPT)
    assert nothing.logits.shape == (0, 2)


def test_heads_that_give_no_rows_are_refused() -> None:
    with pytest.raises(BadConfig, match=r"head: must give \(n, k\) scores, not \(1,\) for n = 1"):
        Scored(target("llama"), lambda h: h.sum(-1))


# --- all of them


def views(model: Decoder) -> list[View]:
    torch.manual_seed(0)
    return [
        Skipped(model, (0, 2)),
        Extended(model, prompt_tokens("llama")),
        Scored(model, nn.Linear(32, 3)),
        Skipped(model, (1,)),
    ]


def test_views_and_their_decoder_do_not_disturb_each_other() -> None:
    model = target("llama")
    every = [model, *views(model)]
    alone = [answer(m, m.cache(), Ask(TREE), PROMPT).logits for m in every]
    assert len({tuple(row[0].tolist()) for row in alone}) == len(every) - 1  # one is the same
    before = [m.calls for m in every]
    caches = [m.cache() for m in every]
    half = PROMPT[:12]
    for m, rows in zip(every, caches, strict=True):
        answer(m, rows, Ask(TokenTree(half[-1]).chain([1, 2])), half, chunk=5)
    for m, rows, logits in zip(every, caches, alone, strict=True):
        assert_close(answer(m, rows, Ask(TREE), PROMPT, chunk=5).logits, logits)
    calls = [m.calls - count for m, count in zip(every, before, strict=True)]
    assert calls == [calls[0]] * len(every)


def test_views_have_no_second_copy_of_a_weight() -> None:
    model = target("llama")
    assert model.loop is not None
    for view in views(model):
        assert view.hf is model.hf and view.loop is model.loop
        for ours, theirs in zip(view.loop.layers, model.loop.layers, strict=True):
            pointers = [p.data_ptr() for p in ours.parameters()]
            assert pointers == [p.data_ptr() for p in theirs.parameters()]
        held = [value for value in vars(view).values() if isinstance(value, torch.Tensor)]
        assert held == ([view.embeddings] if isinstance(view, Extended) else [])


def test_views_of_views() -> None:
    model, added = target("gemma2"), prompt_tokens("gemma2", 4)
    torch.manual_seed(0)
    head = nn.Linear(32, 2)
    twice = Extended(Extended(model, added[:1]), added[1:])
    view = Scored(Skipped(twice, (0, 1)), head)
    assert view.name == "gemma2[1 more tokens][3 more tokens][layers 0-1][scores]"
    assert view.known_ids == VOCAB + 4
    path = [VOCAB, VOCAB + 3]
    scores = view.score(PROMPT, TokenTree(PROMPT[-1]).chain(path))[-1]
    h = torch.cat([rows_of_ids("gemma2"), added])[[*PROMPT, *path]]
    with torch.inference_mode():
        assert_close(scores, head(last_states("gemma2", h, (0, 1)))[-1])
    with pytest.raises(BadConfig, match="must be some of 0,2"):
        Skipped(Skipped(model, (0, 2)), (1,))


def test_a_view_drafts_for_its_decoder() -> None:
    """In one engine, with one set of weights, as a draft model of another kind."""
    model = target("llama")
    plain = wrap(tiny("llama")).generate(PROMPT, "plain", max_new_tokens=24).tokens
    whole, half = Skipped(model, (0, 1, 2)), Skipped(model, (0, 2))
    out = pair_models(model, None, {"draft": whole}, None, []).generate(
        PROMPT, "draft:nodes=4", max_new_tokens=24
    )
    assert out.tokens == plain and out.stats.accepted == out.stats.drafted > 0
    out = pair_models(model, None, {"draft": half}, None, []).generate(
        PROMPT, "draft:nodes=4", max_new_tokens=24
    )
    assert out.tokens == plain and out.stats.accepted < out.stats.drafted
    assert whole.calls > 0 and half.calls > 0


def test_costs_of_a_view_are_its_own() -> None:
    model = target("llama")
    names = [model_identity(m) for m in (model, *views(model))]
    assert len(set(names)) == len(names)


def test_models_whose_loop_is_not_ours_are_refused() -> None:
    model = Decoder(tiny("nanochat"), "small")
    for make in (
        lambda m: Skipped(m, (0,)),
        lambda m: Extended(m, torch.zeros(1, 32)),
        lambda m: Scored(m, nn.Linear(32, 1)),
    ):
        with pytest.raises(Unsupported) as caught:
            make(model)
        line = str(caught.value)
        assert "cannot run on small: it needs layers that can be run one by one" in line
        assert "use a model of another family" in line and "\n" not in line
    with pytest.raises(Unsupported, match="it is no torch model"):
        Skipped(Recording(8), (0,))  # type: ignore[arg-type]
