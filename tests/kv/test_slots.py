"""Keys are turned once, from where they were made to their rows."""

from __future__ import annotations

import pytest
import torch

from foretell.cache.cache import Cache
from foretell.errors import Unsupported
from foretell.kv.slots import Slots, find_turn
from foretell.testing.toy import Toy
from tests.kv.policies import target

HEADS, WIDTH, LAYERS = 3, 2, 2


def moved(keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """A key is (position, token), so that what it says can be read."""
    return torch.stack([keys[..., 0] + by, keys[..., 1]], -1)


def grow(cache: Cache, tokens: int) -> None:
    """Tokens with keys made at the positions of their rows."""
    cache.reserve(cache.base + tokens)
    for keys in cache.k:
        for i in range(tokens):
            row = cache.base + i
            keys[:, row, 0] = cache.length - cache.offset + i
            keys[:, row, 1] = cache.length + i
    cache.base += tokens
    cache.length += tokens


@pytest.mark.parametrize("groups", [1, HEADS])
def test_every_key_stands_at_its_row(groups: int) -> None:
    draws = torch.Generator().manual_seed(groups)
    shape = (HEADS, WIDTH, WIDTH)
    cache = Cache([shape] * LAYERS, torch.float32, torch.device("cpu"), 8)
    slots = Slots(moved, still=2)
    tokens: list[list[list[int]]] = [[[] for _ in range(HEADS)] for _ in range(LAYERS)]
    for size in (9, 1, 4, 2):
        grow(cache, size)
        chosen = []
        for layer in range(LAYERS):
            others = [2 + torch.randperm(cache.base - 2, generator=draws) for _ in range(groups)]
            rows = torch.stack([torch.cat([torch.arange(2), o[:4].sort().values]) for o in others])
            chosen.append(rows)
            for head in range(HEADS):
                known = tokens[layer][head]
                known += range(cache.length - cache.base + len(known), cache.length)
                tokens[layer][head] = [known[row] for row in rows.expand(HEADS, -1)[head].tolist()]
        before = slots
        slots = slots.keep_rows(cache, chosen)
        assert slots is not before and cache.base == 6
        assert cache.row_positions() == range(6)
        for keys, heads in zip(cache.k, tokens, strict=True):
            assert keys[:, :6, 0].tolist() == [[0, 1, 2, 3, 4, 5]] * HEADS
            assert keys[:, :6, 1].tolist() == heads
    assert not slots.without_rows().keys and slots.without_rows().still == 2


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "glm4", "cohere2", "granite", "phi3"])
def test_heads_turn_alone_as_they_do_together(family: str) -> None:
    turn = find_turn("any", target(family))
    width = target(family).layout[0][1]
    keys = torch.randn(2, 5, width)
    by = torch.randint(-40, 40, (2, 5))
    apart = turn(keys, by)
    for head in range(2):
        assert torch.allclose(apart[head], turn(keys, by[head])[head], atol=1e-6)
    assert torch.allclose(turn(apart, -by), keys, atol=1e-5)
    assert not torch.allclose(apart, keys, atol=1e-2)


def test_a_model_that_cannot_turn_keys_is_named() -> None:
    with pytest.raises(Unsupported, match="kv=any"):
        find_turn("any", Toy(vocab=7))
