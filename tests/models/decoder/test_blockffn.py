"""Decoders of blocks: what drafts compute is the whole layer's, and trees cost what unions cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foretell
from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadModel, ForetellError
from foretell.models.decoder import blockffn
from foretell.models.decoder.blockffn import (
    BlockDecoder,
    BlockFFNConfig,
    BlockFFNForCausalLM,
    Unions,
    watch_routers,
)
from foretell.ops import expert_blocks
from foretell.speculation.draft_size import Policy, estimate_nodes
from tests import laws, tiny

BLOCKS, WIDTH = 8, 6
PROMPT = [(7 * i * i + 3 * i + 5) % 97 for i in range(19)]


def made(rest: float = 0.4, alike: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model. `alike`: all tokens activate much the same blocks."""
    torch.manual_seed(0)
    config = BlockFFNConfig(
        vocab_size=len(tiny.tokenizer()),
        hidden_size=32,
        intermediate_size=BLOCKS * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_blocks=BLOCKS,
        block_width=WIDTH,
        max_position_embeddings=tiny.CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.35,
    )
    hf = BlockFFNForCausalLM(config).requires_grad_(False)
    if alike:  # states with a large common part that routers read
        hf.model.embed_tokens.weight[:, 0] = 40.0
        for layer in hf.model.layers:
            layer.mlp.router.weight[:, 0] = torch.tensor([1.0, 1.0] + [-1.0] * (BLOCKS - 2))
    return hf.to(dtype).eval()


def rows(model: Any, tree: TokenTree, chunk: int = 99) -> torch.Tensor:
    cache, done = model.cache(), False
    with torch.inference_mode():
        while not done:
            job, done = cache.prepare(Ask(tree), PROMPT, chunk)
            reply = model.forward([job])[0]
    logits: torch.Tensor = reply.logits
    return logits


def test_unions_of_trees_give_the_rows_of_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = made(dtype=torch.float64)
    model = BlockDecoder(hf, "tiny")
    assert model.loop is not None and {"layers", "parts", "tree"} <= model.caps
    tree = TokenTree(PROMPT[-1]).chain([3, 44]).chain([60, 8]).chain([9], at=1)
    found = rows(model, tree, 5)
    counts = [layer.last for layer in model.layers]
    assert all(last is not None and 0 < last[1] <= BLOCKS for last in counts)
    for node in range(len(tree)):
        path = torch.tensor([[*PROMPT, *tree.tokens_to(node)]])
        with torch.enable_grad():  # whole layers
            wanted = hf(path).logits[0, -1]
        torch.testing.assert_close(found[node], wanted, rtol=1e-9, atol=1e-9)

    def lacking(*given: Any) -> tuple[torch.Tensor, int]:
        """A union without its last block."""
        x, scores, up, down = given
        last = int((scores != 0).flatten(0, -2).any(0).nonzero()[-1, 0])
        scores = scores.clone()
        scores[..., last] = 0
        return expert_blocks.active_blocks(x, scores, up, down)

    monkeypatch.setattr(blockffn, "active_blocks", lacking)
    assert not torch.allclose(rows(model, tree), found, atol=1e-3)


def test_a_recording_has_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A union of its example would be wrong for any other token."""

    def refused(*_: Any) -> None:
        raise AssertionError("a union was computed")

    layer, x = made().model.layers[0].mlp, torch.randn(1, 3, 32)
    with torch.no_grad():
        wanted = layer(x)
        monkeypatch.setattr(blockffn, "active_blocks", refused)
        with pytest.raises(AssertionError):
            layer(x)
        monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
        torch.testing.assert_close(layer(x), wanted)


def test_drafts_batches_and_folders(tmp_path: Path) -> None:
    place = tiny.save(made(), tmp_path / "model")
    lm = foretell.load(place)
    assert type(lm.models["target"]) is BlockDecoder
    prompts = [PROMPT, PROMPT[3:], PROMPT[::-1]]
    alone = [lm.generate(p, method="plain", max_new_tokens=16).tokens for p in prompts]
    for method in ("ngram:nodes=6", "token-recycling:nodes=8"):
        outs = lm.generate(prompts, method=method, max_new_tokens=16)
        assert [out.tokens for out in outs] == alone, method
    for options in ({"backend": "openvino"}, {"dtype": "int8"}, {"exact_bits": True}):
        with pytest.raises(ForetellError, match="unions of blocks"):
            foretell.load(place, **options)  # type: ignore[arg-type]
    raw = json.loads((place / "config.json").read_text())
    assert raw["model_type"] == "blockffn" and raw["num_blocks"] == BLOCKS
    for change in ({"num_blocks": None}, {"block_width": 7}):
        (place / "config.json").write_text(json.dumps({**raw, **change}))
        with pytest.raises(BadModel) as caught:
            foretell.load(place)
        assert "\n" not in str(caught.value)


# --- costs


def test_work_is_what_is_read() -> None:
    """Known unions, number by number."""
    model = BlockDecoder(made(), "tiny")
    model.unions.means = {1: 0.25, 4: 0.5, 16: 0.5}
    assert model.unions.share_curve(16)[[0, 1, 3, 7, 15]].tolist() == [0.25, 0.375, 0.5, 0.5, 0.5]
    others = model.weight_bytes - model.block_bytes
    assert model.block_bytes == 2 * 2 * 32 * BLOCKS * WIDTH * 4
    assert model.work(4)[[0, 3]].tolist() == [
        others + model.block_bytes / 4,
        others + model.block_bytes / 2,
    ]
    assert model.work(128)[127] == 2 * model.work(64)[63]


def test_unions_are_measured_and_followed() -> None:
    model = BlockDecoder(made(), "tiny")
    probed = dict(model.unions.means)
    assert [*probed] == [1, 2, 4, 8, 16, 32, 64]
    assert all(np.diff([*probed.values()]) >= 0) and probed[1] < probed[8]
    tree = TokenTree(PROMPT[-1]).chain([3, 44, 60, 8])
    cache = model.cache()
    with torch.inference_mode():
        job, _ = cache.prepare(Ask(tree), PROMPT[-1:], 99)
        with watch_routers() as seen:
            model.forward([job])
    active = torch.cat([logits[0] > 0 for logits in seen], -1)
    assert len(active) == 5
    assert model.unions.means[5] == pytest.approx(float(active.any(0).float().mean()))
    one = probed[1] + (float(active.float().mean()) - probed[1]) / 16
    assert model.unions.means[1] == pytest.approx(one)
    noted = Unions(4)
    for part in (0.5, 1.0):
        noted.note_share(3, part)
    assert noted.means == {3: pytest.approx(0.5 + 0.5 / 16)}


def test_what_forwards_cost_by_unions_changes_the_tree() -> None:
    """Nothing is timed. Where all tokens need the same blocks a draft is nearly free; where each
    needs others the same drafter's tree is cut.
    """
    sizes = {}
    for alike in (True, False):
        model = BlockDecoder(made(alike=alike), "tiny")
        model.block_bytes = int(0.95 * model.weight_bytes)  # blocks weigh more than all else
        if not alike:  # in place of what it measured
            parts = np.minimum(1, 0.02 * np.arange(1, 65))
            model.unions.means = {size: float(parts[size - 1]) for size in (1, 2, 4, 8, 16, 32, 64)}
        engine = Engine({"target": model})
        ctx = Context(engine, Request([1], laws.build("ngram"), Sampling()))
        ctx.timed = True
        policy = Policy(ctx, 0)
        curve = ctx.costs.curve(32)
        np.testing.assert_allclose(curve / curve[0], model.work(32) / model.work(1), rtol=1e-6)
        tree = TokenTree(0)
        for token in range(1, 25):
            tree.add(0, token, value=0.15, source="s")
        _, policy.kinds = estimate_nodes(tree, policy.chances)
        for kind in policy.kinds[1:]:
            policy.chances[kind] = [1e9, 0.15e9]
        sizes[alike] = len(policy.fit_tree(tree))
    assert sizes[True] > 12 > 2 * sizes[False]


def test_alike_tokens_have_small_unions() -> None:
    """The model whose tokens are alike, of the test above, has that by its weights."""
    alike, other = (BlockDecoder(made(alike=kind), "tiny").unions.means for kind in (True, False))
    assert alike[64] < 0.5 < other[64]
