"""Parts of the layers for chosen tokens, beside rows that are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.model import Computed
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.kv.evict import layer_skipping as skipping
from foretell.kv.evict.layer_skipping import (
    LastRow,
    empty_view,
    join_forwards,
    pass_layers,
    piece_of,
)
from foretell.testing.toy import Toy
from tests.kv.by_hand import ByHand
from tests.kv.policies import PROMPT, target

LAYERS = (1, 2)


def begun() -> tuple[Any, Any]:
    """A job of a text's last token, below rows of layer 0 and 1 of all others."""
    cache = target(dtype=torch.float64).cache()
    done = False
    while not done:
        job, done = cache.prepare(Ask(TokenTree(PROMPT[-1])), PROMPT, 1000)
        if not done:
            target(dtype=torch.float64).forward([job])
    return cache, job


@pytest.mark.parametrize("piece", [1, 2, 512])
@torch.inference_mode()
def test_tokens_read_what_is_before_them_whether_it_has_rows_or_not(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipping, "PIECE", piece)
    model = target(dtype=torch.float64)
    cache, job = begun()
    end = len(PROMPT) - 1
    held, places = torch.tensor([0, 4, 5, 9, 13]), torch.tensor([2, 6, 7, 11, end])
    random = torch.Generator().manual_seed(1)
    states = torch.randn(len(places), 32, generator=random, dtype=torch.float64)
    before = [[part[layer].clone() for part in (cache.k, cache.v)] for layer in range(3)]
    watcher = LastRow(LAYERS[-1])
    view = empty_view(cache, len(PROMPT))
    parts = pass_layers(job, view, LAYERS, held, places, states, model._compute_jobs, watcher, (3,))
    assert len(parts) == -(-4 // piece) + 1

    hand = ByHand()
    rows = [
        {at: [part[:, at : at + 1] for part in pair] for at in held.tolist()} for pair in before
    ]
    outs = []
    for place, state in zip(places.tolist(), states, strict=True):
        h = state[None]
        for layer in LAYERS:
            q, *rows[layer][place] = hand.rows(layer, h, [place])
            seen = sorted(at for at in rows[layer] if at <= place)
            k, v = (torch.cat([rows[layer][at][i] for at in seen], 1) for i in (0, 1))
            h, weights = hand.through(layer, h, q, k, v, torch.ones(1, len(seen), dtype=torch.bool))
        outs.append(h)
    assert torch.allclose(torch.cat([part.hidden[3] for part in parts]), torch.cat(outs), atol=1e-5)
    assert torch.allclose(
        parts[-1].logits, hand.hf.lm_head(hand.hf.model.norm(outs[-1])), atol=1e-5
    )
    assert watcher.scores is not None
    order = torch.cat([held, places]).argsort()
    assert torch.allclose(watcher.scores[order], weights[:, 0].mean(0), atol=1e-5)
    for layer in range(3):
        for i, part in enumerate((cache.k, cache.v)):
            new = places.tolist() if layer in LAYERS else []
            for at in range(len(PROMPT)):
                want = rows[layer][at][i][:, 0] if at in new else before[layer][i][:, at]
                assert torch.allclose(part[layer][:, at], want, atol=1e-5)


@torch.inference_mode()
def test_a_piece_leaves_the_cache_of_its_job_as_it_is() -> None:
    cache, job = begun()
    length, base = cache.length, cache.base
    piece = piece_of(job, 3, [4, 6], torch.zeros(2, 32, dtype=torch.float64), LAYERS)
    assert (piece.positions, piece.start, piece.cache.base) == ([4, 6], 3, 3)
    assert piece.cache.k is cache.k and piece.plain is False and piece.suits(True, True)
    assert (cache.length, cache.base, cache.policy) == (length, base, None)
    view = empty_view(cache, 40)
    assert view.k[0].shape[1] == 40 and view.k[0].data_ptr() != cache.k[0].data_ptr()


def test_forwards_that_make_up_one() -> None:
    none = Computed(torch.empty(0, 1), {}, "nobody", 0)
    first = Computed(torch.zeros(0, 5), {}, "native", 7)
    last = Computed(torch.ones(1, 5), {}, "torch", 2)
    whole = join_forwards([none, first, first, last], {})
    assert whole.computed_by == "native+torch (skipping)" and whole.width == 16
    assert torch.equal(whole.logits, last.logits)


def test_what_is_refused() -> None:
    assert skipping.check_layers("fastkv", target()) == 3
    with pytest.raises(Unsupported, match="that can be run one by one"):
        skipping.check_layers("fastkv", Toy(9))
