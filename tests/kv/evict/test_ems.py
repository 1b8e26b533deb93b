"""EMS against loops over transformers' own attention, and the laws of its merging."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.errors import BadConfig
from foretell.kv.evict.ems import Ems, Merging, merge_rows
from tests.kv.policies import PROMPT
from tests.kv.twin import Rows, Twin, by_engine, by_loops, grouped, same

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "ems:budget=10,every=3,window=3,sinks=2,kernel=3,tau=0.2"

TOKENS = 13
SMALL = Ems(10, every=4, window=3, sinks=2, kernel=3, tau=0.1)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return max(0.0, float(a @ b / (a.norm() * b.norm())))


class Loops(Twin):
    """`slip` names a mistake."""

    def __init__(self, kv: Ems, slip: str = "") -> None:
        self.kv, self.slip = kv, slip
        # Of each layer and head: place in the text, and what all nodes and what the last ones gave.
        self.known: dict[tuple[int, int], list[list[float]]] = {}
        self.merged = 0

    def change(self, length: int, prompt: int, rows: Rows, weights: list[torch.Tensor]) -> None:
        kv = self.kv
        first = prompt if prompt > kv.budget else kv.budget + kv.every
        beyond = length - first
        following = first if length <= first else length + -beyond % kv.every
        for layer, pair in enumerate(rows):
            given = grouped(weights[layer], len(pair[0])).tolist()
            made = []
            for head, nodes in enumerate(given):
                known = self.known.setdefault((layer, head), [])
                known += [[place, 0.0, 0.0] for place in range(length - len(nodes), length)]
                for i, node in enumerate(nodes):
                    last = length - len(nodes) + i >= following - kv.window
                    for row, weight in enumerate(node[: len(known)]):
                        known[row][1] += weight
                        known[row][2] += weight * last
                if beyond >= 0 and beyond % kv.every == 0 and len(known) > kv.budget:
                    count = kv.window if beyond == 0 else min(kv.window, kv.every)
                    keys, values = (list(part[head]) for part in pair)
                    made.append(self.evict(layer, head, length, count, keys, values))
            if made:
                pair[:] = [
                    torch.stack([torch.stack(head[part]) for head in made]) for part in (0, 1)
                ]

    def evict(
        self,
        layer: int,
        head: int,
        length: int,
        count: int,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        kv, known = self.kv, self.known[layer, head]
        total, older = len(known), len(known) - kv.window
        overall = [row[1] / (length - row[0]) for row in known]
        local = [row[2] / count for row in known]
        half = kv.kernel // 2
        for row in range(older):
            near = range(max(0, row - half), min(older, row + half + 1))
            local[row] = max(known[i][2] / count for i in near)
        factor = (sum(local) / total) / (sum(overall) / total)
        scores = [max(g * factor, lo) for g, lo in zip(overall, local, strict=True)]
        if self.slip == "sum":
            scores = [g * factor + lo for g, lo in zip(overall, local, strict=True)]
        forced = [*range(kv.sinks), *range(older, total)]
        free = sorted(set(range(total)) - set(forced), key=lambda row: (-scores[row], -row))
        order = [*forced, *free]
        centres = sorted(order[: kv.budget])
        reached = sum(scores[row] for row in order[: kv.budget])
        weight = {row: scores[row] for row in centres}
        new_keys = {row: scores[row] * keys[row] / keys[row].norm() for row in centres}
        lengths = {row: scores[row] * keys[row].norm() for row in centres}
        new_values = {row: scores[row] * values[row] for row in centres}
        for row in order[kv.budget : int((1 + kv.rho) * kv.budget)]:
            if reached >= kv.mass * sum(scores):
                break
            reached += scores[row]
            alike = [
                cosine(keys[row], keys[centre])
                * (1.0 if self.slip == "keys alone" else cosine(values[row], values[centre]))
                for centre in centres
            ]
            if max(alike) < kv.tau:
                continue
            self.merged += 1
            into = centres[alike.index(max(alike))]
            weight[into] += scores[row]
            new_keys[into] = new_keys[into] + scores[row] * keys[row] / keys[row].norm()
            lengths[into] = lengths[into] + scores[row] * keys[row].norm()
            new_values[into] = new_values[into] + scores[row] * values[row]
        self.known[layer, head] = [
            [known[row][0], weight[row] * (length - known[row][0]), 0.0] for row in centres
        ]
        if self.slip == "short keys":
            return (
                [new_keys[row] / weight[row] for row in centres],
                [new_values[row] / weight[row] for row in centres],
            )
        return (
            [lengths[r] / weight[r] * new_keys[r] / new_keys[r].norm() for r in centres],
            [new_values[row] / weight[row] for row in centres],
        )


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:6]], ids=["long", "short"])
@pytest.mark.parametrize("mass", [0.8, 1.0])
def test_it_holds_the_rows_that_loops_make(prompt: list[int], mass: float) -> None:
    kv = Ems(10, every=4, window=3, sinks=2, kernel=3, tau=0.1, mass=mass, rho=0.9)
    output, held = by_engine(kv, prompt, TOKENS)
    twin = Loops(kv)
    assert same(held, by_loops(twin, prompt, output))
    assert twin.merged > 5 or len(prompt) < 10


@pytest.mark.parametrize("slip", ["sum", "keys alone", "short keys"])
def test_a_slip_is_noticed(slip: str) -> None:
    output, held = by_engine(SMALL, PROMPT, TOKENS)
    assert not same(held, by_loops(Loops(SMALL, slip), PROMPT, output))


def drawn(seed: int, heads: int = 3, rows: int = 30, width: int = 4) -> list[torch.Tensor]:
    """Keys, values and scores."""
    made = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, heads, rows, width, generator=made, dtype=torch.float64)
    return [keys, values, torch.rand(heads, rows, generator=made, dtype=torch.float64)]


def classes(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return Merging(SMALL.budget, SMALL.every, settings=SMALL).classify_rows(scores)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tau", [0.0, 0.2, 0.5])
def test_scores_of_merged_rows_are_kept(seed: int, tau: float) -> None:
    keys, values, scores = drawn(seed)
    centres, others = classes(scores)
    new_keys, new_values, total = merge_rows(keys, values, scores, centres, others, tau)
    moved = 0
    for head in range(len(keys)):
        rows = [row for row in others[head].tolist() if row >= 0]
        alike = [
            max(
                cosine(keys[head, row], keys[head, c]) * cosine(values[head, row], values[head, c])
                for c in centres[head]
            )
            for row in rows
        ]
        goes = [row for row, likeness in zip(rows, alike, strict=True) if likeness >= tau]
        moved += len(goes)
        want = scores[head, centres[head]].sum() + scores[head, goes].sum()
        assert math.isclose(float(total[head].sum()), float(want), rel_tol=1e-12)
        mass = (total[head][:, None] * new_values[head]).sum(0)
        before = scores[head][:, None] * values[head]
        kept = before[centres[head]].sum(0) + before[goes].sum(0)
        assert torch.allclose(mass, kept, atol=1e-12)
    assert moved
    untouched = total == scores.gather(1, centres)
    assert untouched.any() or tau == 0.0
    old = keys.gather(1, centres[..., None].expand(-1, -1, keys.shape[-1]))
    assert torch.equal(new_keys[untouched], old[untouched])


def test_classes_keep_first_and_last_rows_and_stop_at_the_mass() -> None:
    _, _, scores = drawn(1)
    centres, others = classes(scores)
    for head in range(len(scores)):
        kept = centres[head].tolist()
        assert kept == sorted(set(kept)) and {0, 1, 27, 28, 29} <= set(kept)
        rows = [row for row in others[head].tolist() if row >= 0]
        assert not set(rows) & set(kept)
        left = set(range(30)) - set(rows) - set(kept)
        mass = float(scores[head].sum()) - float(scores[head, sorted(left)].sum())
        worst = float(scores[head, rows].min()) if rows else 0.0
        assert all(float(scores[head, row]) <= worst for row in left)
        enough = SMALL.mass * float(scores[head].sum())
        assert len(rows) == SMALL.budget or mass - worst < enough <= mass


def test_rows_that_are_equal_merge_to_themselves() -> None:
    keys, values, scores = drawn(2, rows=12)
    keys[:, 8:] = keys[:, 3:4]
    values[:, 8:] = values[:, 3:4]
    centres = torch.arange(8).expand(3, -1)
    others = torch.arange(8, 12).expand(3, -1)
    new_keys, new_values, total = merge_rows(keys, values, scores, centres, others, 0.99)
    assert torch.allclose(new_keys, keys[:, :8]) and torch.allclose(new_values, values[:, :8])
    assert torch.allclose(total[:, 3], scores[:, 3] + scores[:, 8:].sum(1))


def test_opposite_values_are_not_alike() -> None:
    keys, values, scores = drawn(3, rows=12)
    keys[:, 11], values[:, 11] = -keys[:, 3], -values[:, 3]
    centres = torch.arange(3, 4).expand(3, -1)
    new, _, total = merge_rows(keys, values, scores, centres, torch.full((3, 1), 11), 0.5)
    assert torch.equal(total, scores[:, 3:4]) and torch.equal(new, keys[:, 3:4])


def test_merged_rows_of_16_bits_are_means_in_32() -> None:
    keys, values, scores = drawn(4, rows=40)
    keys[:, 1:], values[:, 1:] = keys[:, :1], values[:, :1]
    keys, values = keys.to(torch.bfloat16), values.to(torch.bfloat16)
    centres, others = torch.zeros(3, 1, dtype=torch.long), torch.arange(1, 40).expand(3, -1)
    new_keys, new_values, total = merge_rows(keys, values, scores.float(), centres, others, 0.5)
    assert new_keys.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.allclose(new_keys, keys[:, :1], rtol=1 / 128)
    assert torch.equal(new_values, values[:, :1])


def test_without_merging_rows_are_those_of_the_prompt() -> None:
    kv = Ems(10, every=0, window=3, sinks=2, kernel=3, tau=1.5)
    _, held = by_engine(kv, PROMPT, TOKENS)
    assert min(rows[0][0].shape[1] for rows in held.values()) == 10
    _, full = by_engine(None, PROMPT, 2)
    for ours, theirs in zip(held[len(PROMPT)], full[len(PROMPT)], strict=True):
        for mine, rows in zip(ours, theirs, strict=True):
            near = (mine[:, :, None] - rows[:, None]).abs().amax(-1) < 1e-9
            assert near.any(-1).all()


def test_a_text_within_the_budget_is_bit_equal() -> None:
    kv = Ems(len(PROMPT) + TOKENS, window=3)
    output, held = by_engine(kv, PROMPT, TOKENS)
    want, whole = by_engine(None, PROMPT, TOKENS)
    assert output == want
    for at in held.keys() & whole.keys():
        for ours, full in zip(held[at], whole[at], strict=True):
            assert all(map(torch.equal, ours, full))


@pytest.mark.parametrize(("name", "value"), [("budget", 36)])
def test_bad_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(BadConfig, match=f"ems:{name}"):
        Ems(**{name: value})  # type: ignore[arg-type]
