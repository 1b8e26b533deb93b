"""Keys that are moved are those that the model makes at the other positions."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import Decoder
from tests.models.decoder.families import tiny

TOKENS = [5, 17, 3, 3, 88, 41, 9]
# With half of a key turned, scaled tables, layers without positions, windows, norms of keys.
TAKEN = "llama gpt_neox stablelm smollm3 mistral qwen3 gemma2 glm4".split()
REFUSED = {
    "gemma3_text": "not rotated one by one",
    "deepseek_v3": "layer 0 has no keys that turn",
    "gpt2": "no rotations of its keys",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@cache
def decoder(family: str, dtype: torch.dtype = torch.float64) -> Decoder:
    return Decoder(tiny(family, dtype=dtype), family)


@torch.inference_mode()
def keys_at(model: Decoder, start: int) -> list[torch.Tensor]:
    """Of every layer (KV, n, D): those of TOKENS, each of which stands alone, from `start` on."""
    found = []
    for place, token in enumerate(TOKENS):
        held = model.cache()
        held.offset = -start - place
        job, _ = held.prepare(Ask(TokenTree(token)), [token], 1)
        model.forward([job])
        found.append([rows[:, :1].clone() for rows in held.k])
    return [torch.cat(rows, 1) for rows in zip(*found, strict=True)]


def worst(model: Decoder, start: int, end: int) -> float:
    """How far keys moved from `start` on to `end` on are from those that the model makes there."""
    places = torch.arange(len(TOKENS))
    moved = model.find_move("test")(keys_at(model, start), start + places, end + places)
    pairs = zip(moved, keys_at(model, end), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("family", TAKEN)
@pytest.mark.parametrize(("start", "end"), [(3, 90), (90, 3)])
def test_moved_keys_are_those_of_the_place(family: str, start: int, end: int) -> None:
    assert worst(decoder(family), start, end) < 1e-12


def test_a_family_that_turns_in_float32_does_so_here() -> None:
    assert worst(decoder("cohere2"), 3, 90) < 1e-6


def test_tables_that_are_scaled_are_scaled_once() -> None:
    model = Decoder(tiny("llama", dtype=torch.float64, rope_parameters=YARN), "yarn")
    assert model.loop is not None and model.loop.rotary.attention_scaling != 1
    assert worst(model, 3, 90) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_less_bits_they_differ_by_rounding(dtype: torch.dtype) -> None:
    bound = 1e-5 if dtype == torch.float32 else 0.05
    assert worst(decoder("llama", dtype), 3, 90) < bound


@pytest.mark.parametrize("family", REFUSED)
def test_keys_that_turn_otherwise_are_refused(family: str) -> None:
    with pytest.raises(Unsupported, match=REFUSED[family]):
        decoder(family).find_move("test")


# --- single turns

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
    turn = model.find_turn("kv=x")
    here, there = first_keys(model, TEXT, 3), first_keys(model, TEXT, 20)
    moved = turn(here, torch.full((10,), 17))
    assert torch.allclose(moved, there, atol=1e-6) and not torch.allclose(here, there, atol=1e-2)
    back = turn(there, torch.tensor([-17] * 5 + [0] * 5))
    assert torch.allclose(back[:, :5], here[:, :5], atol=1e-6)
    assert torch.equal(back[:, 5:], there[:, 5:])


@pytest.mark.parametrize("family", ["gpt2", "opt", "smollm3"])
def test_families_without_rotations_are_refused_by_name(family: str) -> None:
    model = Decoder(tiny(family), family)
    with pytest.raises(Unsupported, match=f"kv=x cannot run on {family}"):
        model.find_turn("kv=x")
