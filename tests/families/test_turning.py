"""Keys that are moved: as if they had been made at their new positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.families.decoder import Decoder
from tests.families.families import tiny

TEXT = [(11 * i + i * i) % 90 for i in range(10)]


@torch.inference_mode()
def first_keys(model: Any, text: list[int], shift: int) -> torch.Tensor:
    """Of the first layer (KV, n, D), at positions from `shift` on."""
    cache = model.cache()
    job, _ = cache.prepare(Ask(TokenTree(text[-1])), text, 99)
    job.scratch_positions = [position + shift for position in job.scratch_positions]
    model.forward([job])
    keys: torch.Tensor = cache.k[0][:, : len(text)]
    return keys


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "glm4", "olmo2"])
def test_turned_keys_are_those_made_at_the_new_positions(family: str) -> None:
    """Halves and pairs that turn, and families that turn a part of a key."""
    model = Decoder(tiny(family, dtype=torch.float64), family)
    turn = model.turning("kv=x")
    here, there = first_keys(model, TEXT, 3), first_keys(model, TEXT, 20)
    moved = turn(here, torch.full((10,), 17))
    assert torch.allclose(moved, there, atol=1e-6) and not torch.allclose(here, there, atol=1e-2)
    back = turn(there, torch.tensor([-17] * 5 + [0] * 5))
    assert torch.allclose(back[:, :5], here[:, :5], atol=1e-6)
    assert torch.equal(back[:, 5:], there[:, 5:])


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_families_without_rotations_are_refused_by_name(family: str) -> None:
    model = Decoder(tiny(family), family)
    with pytest.raises(Unsupported, match=f"kv=x cannot run on {family}"):
        model.turning("kv=x")
