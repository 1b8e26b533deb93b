"""double-sparsity: against plain loops, exact top-k, calibrated channels against random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.errors import BadConfig, BadFile, Unsupported
from foretell.kv.select.channels import save_channels
from foretell.kv.select.double_sparsity import DoubleSparsity, Labelled, round_to_bits
from foretell.models.decoder.decoder import Decoder
from tests.kv import driving
from tests.kv.driving import GROUPS, LAYERS, TIMES, WIDTH, differs, rows_of, text_of
from tests.kv.policies import target
from tests.models.decoder.families import tiny

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "double-sparsity:budget=8,channels=8,bits=4,dense=1"
LARGE_SPEC = "double-sparsity:budget=400,channels=8"

PROMPT = 19
WHOLE = text_of(34, seed=5)
CHANNELS = torch.tensor([[[5, 0, 2], [1, 7, 3]], [[4, 6, 0], [2, 3, 5]]])
SMALL = Labelled(1, 7, 4, CHANNELS)


def cut(numbers: torch.Tensor, bits: int) -> list[float]:
    """Each number's nearest of 2 ** bits levels, one by one."""
    if bits == 16:
        return numbers.tolist()
    low, high = float(numbers.min()), float(numbers.max())
    step = (high - low) / (2**bits - 1)
    return [low + round((float(x) - low) / step) * step for x in numbers]


def loops(policy: Labelled) -> driving.Twin:
    @cache
    def label(text: tuple[int, ...], layer: int, group: int) -> list[float]:
        own = range(WIDTH) if policy.channels is None else policy.channels[layer, group].tolist()
        return cut(rows_of(text, layer)[1][group][list(own)], policy.bits)

    def reads(text: tuple[int, ...], layer: int, head: int) -> Sequence[int]:
        places = range(len(text))
        if layer < policy.dense or len(text) <= policy.budget:
            return places
        group = head // TIMES
        own = range(WIDTH) if policy.channels is None else policy.channels[layer, group].tolist()
        asked = cut(rows_of(text, layer)[0][head][list(own)], policy.bits)
        labels = [label(text[: place + 1], layer, group) for place in places]
        given = [sum(a * b for a, b in zip(asked, one, strict=True)) for one in labels]
        forced = {*places[: policy.sinks], *places[len(text) - policy.recent :]}
        others = sorted((p for p in places if p not in forced), key=lambda p: -given[p])
        return sorted({*forced, *others[: policy.budget - len(forced)]})

    return reads


@pytest.mark.parametrize(
    ("made", "depth", "wrong", "chunk"),
    [
        (SMALL, 0, False, 99),
        (SMALL, 6, True, 1),
        (SMALL, 6, False, 5),
        (replace(SMALL, channels=None, dense=0, bits=2, sinks=2, recent=3), 5, True, 99),
    ],
)
def test_every_node_reads_what_loops_say(
    made: Labelled, depth: int, wrong: bool, chunk: int
) -> None:
    assert differs(made, PROMPT, WHOLE, loops(made), depth, wrong, chunk) < 1e-9


def test_labels_that_were_kept_are_those_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.kv.select.double_sparsity.AT_ONCE", 3)
    told: list[Labelled] = []
    for _ in driving.drive(SMALL, PROMPT, WHOLE, 5, True, told=told.append):
        pass
    (policy,) = told
    assert policy.labelled > PROMPT + 10 and policy.labels.keys() == {1}
    keys = torch.stack(
        [rows_of(tuple(WHOLE[: end + 1]), 1)[1] for end in range(policy.labelled)], 1
    )
    assert torch.equal(policy.labels[1], policy.label_numbers(1, keys).transpose(1, 2))


def test_all_channels_unrounded_are_the_exact_best() -> None:
    made = Labelled(0, 7, 16, None, sinks=0, recent=0)

    def best(text: tuple[int, ...], layer: int, head: int) -> Sequence[int]:
        q = rows_of(text, layer)[0][head]
        keys = [rows_of(text[: p + 1], layer)[1][head // TIMES] for p in range(len(text))]
        return sorted(range(len(text)), key=lambda p: float(-(q @ keys[p])))[:7]

    assert differs(made, PROMPT, WHOLE, best, 5, True) < 1e-9


def test_channels_of_queries_and_keys_may_be_exchanged_together() -> None:
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    q, k = torch.randn(2, 3, WIDTH), torch.randn(2, 9, WIDTH)
    every = Labelled(0, 4, 4, order.expand(LAYERS, GROUPS, -1))
    plain = Labelled(0, 4, 4, None)
    ours = every.label_numbers(0, q) @ every.label_numbers(0, k).transpose(1, 2)
    assert torch.allclose(
        ours, plain.label_numbers(0, q) @ plain.label_numbers(0, k).transpose(1, 2), atol=1e-5
    )


@pytest.mark.parametrize("slip", ["forgotten label", "another head", "no draft rows"])
def test_slips_are_seen(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SMALL
    if slip == "forgotten label":  # rows that are labelled late keep labels of others
        monkeypatch.setattr("foretell.kv.select.double_sparsity.AT_ONCE", 3)
        own = Labelled._label_rows
        monkeypatch.setattr(
            Labelled, "_label_rows", lambda self, k, end: own(self, [r.flip(1) for r in k], end)
        )
    elif slip == "another head":
        made = replace(SMALL, channels=CHANNELS.flip(1))
    else:  # selects of committed rows only, and reads those of the draft always
        real = Labelled.select_rows

        def reads(self: Any, job: Any, asked: Any) -> Any:
            return replace(real(self, job, asked), first=job.cache.base)

        monkeypatch.setattr(Labelled, "select_rows", reads)
    assert differs(made, PROMPT, WHOLE, loops(SMALL), 5, True) > 1e-3


def test_with_room_for_everything_it_is_the_full_cache_bit_by_bit() -> None:
    ours = driving.drive(replace(SMALL, budget=99), PROMPT, WHOLE, 4, True)
    full = driving.drive(driving.Full(), PROMPT, WHOLE, 4, True)
    for (_, _, mine), (_, _, other) in zip(ours, full, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_is_within_half_a_step(bits: int) -> None:
    numbers = torch.randn(50, 16, dtype=torch.float64)
    step = (numbers.amax(1) - numbers.amin(1)) / (2**bits - 1)
    near = round_to_bits(numbers, bits)
    assert ((near - numbers).abs() <= 0.5001 * step[:, None]).all()
    assert max(len(row.unique()) for row in near) <= 2**bits
    assert torch.equal(round_to_bits(torch.full((2, 5), 0.3), bits), torch.full((2, 5), 0.3))


def test_calibrated_channels_find_more_than_random_ones() -> None:
    random = torch.Generator().manual_seed(0)
    spread = torch.rand(WIDTH * 4, generator=random).square() * 3
    q, k = (torch.randn(1, n, WIDTH * 4, generator=random) * spread for n in (40, 300))
    true = (q @ k.transpose(1, 2)).topk(20, -1).indices
    importance = (q[:, :, None] * k[:, None, :40]).abs().mean((1, 2))[None]

    def recall(order: torch.Tensor) -> float:
        made = Labelled(0, 20, 4, order[..., :8])
        found = (
            (made.label_numbers(0, q) @ made.label_numbers(0, k).transpose(1, 2))
            .topk(20, -1)
            .indices
        )
        return float((found[..., None] == true[..., None, :]).any(-1).float().mean())

    order = importance.argsort(-1, descending=True)
    by_chance = [recall(torch.randperm(WIDTH * 4, generator=random)[None, None]) for _ in range(8)]
    assert recall(order) > max(by_chance) + 0.1


def test_a_table_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    model = target()
    path = tmp_path / "channels.safetensors"
    importance = torch.rand(3, 2, 8)
    save_channels(importance, path, model, 5)
    for where in (path, tmp_path):
        policy = DoubleSparsity(channels=3, calibration=str(where)).build_policy(model)
        assert policy.channels is not None
        assert torch.equal(policy.channels, importance.topk(3, -1).indices)


def test_without_a_table_it_refuses_and_says_how_to_make_one() -> None:
    with pytest.raises(Unsupported, match=r"foretell train channels.*calibration=FILE"):
        DoubleSparsity(channels=3).build_policy(target())
    assert DoubleSparsity(channels=8).build_policy(target()).channels is None


def test_a_table_of_other_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    other = Decoder(tiny("llama"), "other")
    with torch.no_grad():
        other.loop.norm.weight.mul_(2)
    for importance, model in ((torch.rand(3, 2, 8), other), (torch.rand(3, 2, 16), target())):
        save_channels(importance, path, model, 5)
        with pytest.raises(BadFile, match=r"other.safetensors: was made for another model"):
            DoubleSparsity(channels=3, calibration=str(path)).build_policy(target())


@pytest.mark.parametrize(
    ("fields", "said"), [({"budget": 2}, "double-sparsity:budget=2.*at least 3")]
)
def test_bad_settings_are_named(fields: dict[str, int], said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        DoubleSparsity(**fields)  # type: ignore[arg-type]
