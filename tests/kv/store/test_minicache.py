"""Two layers as one: against a plain loop, what is exact, what is untouched, and the bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from foretell.errors import BadConfig, Unsupported
from foretell.kv.store.base import Codes, bytes_of
from foretell.kv.store.minicache import Minicache, Pairs
from foretell.models.decoder.decoder import Decoder
from foretell.spec import build_cache_policy
from tests.kv.policies import PROMPT, run, target
from tests.models.decoder.families import tiny

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "minicache:buffer=4,gamma=0.1"
LARGE_SPEC = "minicache:buffer=400"

LAYERS, HEADS, COUNT, WIDTH = 5, 2, 24, 8
SET = Minicache(gamma=0.1, buffer=8)


def rows(seed: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Of each layer (KV, n, D); neighbours are alike."""
    random = torch.Generator().manual_seed(seed)
    made = torch.randn(LAYERS, HEADS, COUNT, WIDTH, generator=random, dtype=torch.float64)
    return [*made.cumsum(0).to(dtype)]


def form(settings: Minicache = SET, **more: Any) -> Pairs:
    return Pairs(dataclasses.replace(settings, **more), LAYERS, HEADS, WIDTH, WIDTH)


def encoded(pairs: Pairs, dtype: torch.dtype = torch.float64) -> Codes:
    return pairs.encode_rows(rows(1, dtype), rows(2, dtype), 0)


def decoded(pairs: Pairs, dtype: torch.dtype = torch.float64) -> list[tuple[Any, Any]]:
    codes = encoded(pairs, dtype)
    return [pairs.decode_rows(codes[pairs.code_layer(layer)], layer) for layer in range(LAYERS)]


def by_loop(
    shallow: list[Any], deep: list[Any], t: float, gamma: float
) -> tuple[Any, Any, set[int]]:
    """Both layers' rows of tokens, lists of vectors, and the places of those that are kept."""
    angles, found = [], []
    for x, y in zip(shallow, deep, strict=True):
        a, b = (math.sqrt(sum(c * c for c in v)) for v in (x, y))
        omega = math.acos(sum(c * d for c, d in zip(x, y, strict=True)) / (a * b))
        one, other = math.sin((1 - t) * omega), math.sin(t * omega)
        e = [(one * c / a + other * d / b) / math.sin(omega) for c, d in zip(x, y, strict=True)]
        angles.append(omega / math.pi)
        found.append(([a * c for c in e], [b * c for c in e]))
    least = max(angles) - gamma * (max(angles) - min(angles))
    kept = {place for place, angle in enumerate(angles) if angle > least}
    for place in kept:
        found[place] = (shallow[place], deep[place])
    return *zip(*found, strict=True), kept


@pytest.mark.parametrize("per_head", [False, True])
def test_pairs_against_a_loop(per_head: bool) -> None:
    pairs = form(per_head=per_head)
    found = decoded(pairs)
    assert pairs.first_paired == 2
    for side, made in ((0, rows(1)), (1, rows(2))):
        two, three = made[2], made[3]
        units = range(HEADS) if per_head else [slice(None)]
        for unit in units:
            vectors = [
                [layer[unit, token].flatten().tolist() for token in range(COUNT)]
                for layer in (two, three)
            ]
            *want, kept = by_loop(*vectors, SET.t, SET.gamma)
            assert 1 <= len(kept) < COUNT / 2
            for layer, rows_of_layer in zip((2, 3), want, strict=True):
                for token in range(COUNT):
                    got = found[layer][side][unit, token].flatten().tolist()
                    assert got == pytest.approx(rows_of_layer[token], abs=1e-9)
                    exact = made[layer][unit, token].flatten().tolist()
                    assert (got == exact) == (token in kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_layers_and_kept_tokens_are_untouched_and_lengths_stay(dtype: torch.dtype) -> None:
    found = decoded(form(), dtype)
    for side, made in ((0, rows(1, dtype)), (1, rows(2, dtype))):
        for layer in (0, 1, 4):  # below the middle, and one that is left without a partner
            assert torch.equal(found[layer][side], made[layer])
        tolerance = 1e-12 if dtype == torch.float64 else 0.01
        for layer in (2, 3):
            got, want = found[layer][side], made[layer]
            assert got.dtype == dtype and not torch.equal(got, want)
            lengths = [part.transpose(0, 1).flatten(1).double().norm(dim=1) for part in (got, want)]
            torch.testing.assert_close(*lengths, rtol=tolerance, atol=0)
    for everything in (form(gamma=1.0), form(start=LAYERS), form(start=LAYERS - 1)):
        for side, made in ((0, rows(1, dtype)), (1, rows(2, dtype))):
            assert all(torch.equal(decoded(everything, dtype)[i][side], made[i]) for i in range(5))


def test_both_rules_keep_others() -> None:
    kept = [encoded(form(rule=rule))[2]["k.kept"].tolist() for rule in ("distant", "similar")]
    assert kept[0] and kept[1] and not {*kept[0]} & {*kept[1]}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_comes_nearer_with_more_bits(bits: int) -> None:
    whole = decoded(form())
    errors = []
    for count in (bits, 2 * bits):
        near = decoded(form(bits=count)) if count < 16 else whole
        errors.append([
            float((near[layer][side] - whole[layer][side]).norm())
            for layer in range(LAYERS) for side in (0, 1)
        ])  # fmt: skip
    assert all(fine < coarse / 1.5 for coarse, fine in zip(*errors, strict=True))
    codes = encoded(form(bits=bits))
    for place in codes[2]["k.kept"].tolist():
        near = decoded(form(bits=bits))[2][0].transpose(0, 1).flatten(1)
        assert torch.equal(near[place], rows(1)[2].transpose(0, 1).flatten(1)[place])


@pytest.mark.parametrize(("bits", "share"), [(16, 0.8), (4, 0.25)])
def test_bytes_are_those_of_the_card(bits: int, share: float) -> None:
    """Of SmolLM2's shapes, with a twentieth of the tokens kept."""
    layers, heads, count, width = 30, 3, 1024, 64
    random = torch.Generator().manual_seed(0)
    base = torch.randn(heads, count, width, generator=random).bfloat16()
    other = torch.randn(heads, count, width, generator=random).bfloat16()
    deep = base.clone()
    deep[:, ::20] = other[:, ::20]
    made = [base, deep] * (layers // 2)
    pairs = Pairs(Minicache(bits=bits, gamma=0.9, start=14), layers, heads, width, width)
    codes = pairs.encode_rows(made, made, 0)
    kept = len(codes[14]["k.kept"])
    assert 44 <= kept <= 52
    numbers = heads * count * width
    one = numbers * 2 if bits == 16 else numbers * bits // 8 + numbers // 64 * 4
    pair = one + 2 * count * 4 + kept * (4 + 2 * heads * width * 2)
    assert bytes_of(codes) == 2 * (14 * one + 8 * pair)
    assert bytes_of(codes) <= share * 2 * layers * numbers * 2


def test_with_every_token_kept_the_text_is_the_full_caches() -> None:
    (want,) = run(target(), [PROMPT], None)
    for spec in ("minicache:gamma=1,buffer=4", "minicache:start=3,buffer=4"):
        (live,) = run(target(), [PROMPT], build_cache_policy(spec))
        assert live.ctx.output == want.ctx.output


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("snapkv+minicache", "leaves each layer tokens of its own"),
        ("minicache+gear", "two encoders"),
    ],
)
def test_wrong_settings_are_refused(spec: str, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        build_cache_policy(spec)


def test_layers_with_other_positions_are_not_merged() -> None:
    for family in ("smollm3", "gemma3_text"):
        more = {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}
        more |= {"sliding_window": None} if family == "smollm3" else {}
        model = Decoder(tiny(family, **more), family)
        with pytest.raises(Unsupported, match="kv=minicache"):
            Minicache().build_policy(model)
