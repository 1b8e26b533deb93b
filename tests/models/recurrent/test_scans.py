"""Closed forms over chains and trees, compared with loops that go from token to token."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from foretell.cache.masks import ancestors
from foretell.models.recurrent.scans import (
    advance_dual,
    by_head,
    convolve_rows,
    dual_outputs,
    slide_window,
)

HEADS, GROUPS, WIDTH, STATE = 4, 2, 3, 5
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Parts:
    """Decays, x, b and c of `count` nodes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    decays = -normal(count, HEADS).abs()
    x, b, c = (normal(count, *shape) for shape in ((HEADS, WIDTH), *[(GROUPS, STATE)] * 2))
    return decays, x, b, c


def state(seed: int = 9, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HEADS, WIDTH, STATE, generator=generator, dtype=torch.float64).to(dtype)


def one_by_one(before: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last token of a chain reads, and the state after it: the recurrence as it is
    written.
    """
    now = before
    for decay, x, b, c in zip(*parts, strict=True):
        now = now * decay.exp()[:, None, None] + x[..., None] * by_head(b, HEADS)[:, None]
        read = (now * by_head(c, HEADS)[:, None]).sum(-1)
    return read, now


def random_parents(count: int, seed: int) -> tuple[int, ...]:
    chooser = random.Random(seed)
    return tuple(chooser.randrange(-1, node) for node in range(count))


def path(parents: tuple[int, ...], node: int) -> list[int]:
    nodes: list[int] = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def of(parts: Parts, nodes: list[int]) -> Parts:
    decays, x, b, c = (part[nodes] for part in parts)
    return decays, x, b, c


def chain(count: int) -> tuple[int, ...]:
    return tuple(range(-1, count - 1))


def test_a_chain_is_the_sequential_scan() -> None:
    parts = drawn(12)
    out = dual_outputs(state(), *parts, ancestors(chain(12)))
    for node in range(12):
        read, after = one_by_one(state(), of(parts, list(range(node + 1))))
        assert torch.allclose(out[node], read, atol=1e-12)
        decays, x, b, _ = of(parts, list(range(node + 1)))
        assert torch.allclose(advance_dual(state(), decays, x, b), after, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_every_node_of_a_tree_reads_what_its_path_alone_reads(seed: int) -> None:
    parents = random_parents(15, seed)
    parts = drawn(15, seed)
    out = dual_outputs(state(), *parts, ancestors(parents))
    for node in range(15):
        read, _ = one_by_one(state(), of(parts, path(parents, node)))
        assert torch.allclose(out[node], read, atol=1e-12)


def test_new_nodes_alone() -> None:
    """Nodes that were there already are given without what they read."""
    parents = random_parents(15, 3)
    decays, x, b, c = drawn(15)
    whole = dual_outputs(state(), decays, x, b, c, ancestors(parents))
    new = dual_outputs(state(), decays, x, b, c[9:], ancestors(parents))
    assert torch.allclose(new, whole[9:], atol=1e-12)


def test_a_tree_longer_than_a_block_of_the_published_kernels() -> None:
    parents = random_parents(300, 1)
    parts = drawn(300, 1)
    out = dual_outputs(state(), *parts, ancestors(parents))
    for node in (0, 255, 256, 299):
        read, _ = one_by_one(state(), of(parts, path(parents, node)))
        assert torch.allclose(out[node], read, atol=1e-11)


def test_nothing_accepted_leaves_the_state_as_it_is() -> None:
    before = state()
    decays, x, b, _ = drawn(0)
    assert advance_dual(before, decays, x, b) is before


def test_a_step_that_was_turned_off_changes_nothing() -> None:
    """What the published replay relies on: -1e4 before softplus."""
    before = state(dtype=torch.float32)
    decays, x, b, _ = drawn(3, dtype=torch.float32)
    step = F.softplus(torch.full((3, HEADS), -1e4))
    after = advance_dual(before, decays * step, x * step[..., None], b)
    assert torch.equal(after, before)


def test_the_mask_comes_before_the_exponential() -> None:
    """Of a sibling's branch the sum may be so much larger that its exponential overflows."""
    parents = (-1, 0, 0)
    decays, x, b, c = drawn(3, dtype=torch.float32)
    decays[1] = -500.0
    out = dual_outputs(state(dtype=torch.float32), decays, x, b, c, ancestors(parents))
    assert out.isfinite().all()
    sums = ancestors(parents).float() @ decays
    careless = ancestors(parents)[..., None] * (sums[:, None] - sums[None]).neg().exp()
    assert not careless.isfinite().all(), "it did not overflow: nothing was tested"


def test_decays_behind_a_token_that_forgets_all_stay_exact() -> None:
    """Differences of float32 sums lose what is small beside the sums."""
    decays, x, b, c = drawn(40, dtype=torch.float32)
    decays[0], decays[1:] = -30_000.0, -1e-3
    seen = ancestors(chain(40))
    wide = [part.double() for part in (decays, x, b, c)]
    want = dual_outputs(state(), wide[0], wide[1], wide[2], wide[3], seen)
    out = dual_outputs(state(dtype=torch.float32), decays, x, b, c, seen)
    assert (out - want).abs().max() < 1e-4
    sums = decays.cumsum(0)
    narrow = (sums[:, None] - sums[None]).double()
    exact = decays.double().cumsum(0)
    exact_gaps = exact[:, None] - exact[None]
    assert (narrow - exact_gaps).tril().abs().max() > 1e-3, "float32 would have been as good"


@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_over_trees_are_those_of_their_paths(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    taps, channels, count = 4, 6, 12
    rows = torch.randn(count, channels, generator=generator, dtype=torch.float64)
    window = torch.randn(taps - 1, channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(channels, taps, generator=generator, dtype=torch.float64)
    added = torch.randn(channels, generator=generator, dtype=torch.float64) if bias else None

    def alone(nodes: list[int]) -> torch.Tensor:
        lines = torch.cat([window, rows[nodes]])
        out = F.conv1d(lines.T[None], weight[:, None], added, groups=channels)
        return out[0, :, -1]

    for seed in range(4):
        parents = random_parents(count, seed)
        whole = convolve_rows(rows, parents, 0, window, weight, added)
        for node in range(count):
            assert torch.allclose(whole[node], alone(path(parents, node)), atol=1e-12)
        late = convolve_rows(rows, parents, 5, window, weight, added)
        assert torch.allclose(late, whole[5:], atol=1e-12)
    as_tree = convolve_rows(rows, chain(count), 0, window, weight, added)
    as_chain = convolve_rows(rows, None, 0, window, weight, added)
    assert torch.allclose(as_tree, as_chain, atol=1e-12)
    assert torch.allclose(
        convolve_rows(rows, None, 7, window, weight, added), as_chain[7:], atol=1e-12
    )


def test_windows_slide() -> None:
    window = torch.arange(3.0)[:, None]
    rows = torch.arange(10.0, 15.0)[:, None]
    assert slide_window(window, rows[:0]) is window
    assert slide_window(window, rows[:1]).flatten().tolist() == [1, 2, 10]
    assert slide_window(window, rows).flatten().tolist() == [12, 13, 14]
