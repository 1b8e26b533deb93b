"""FSPAD's network: EAGLE-1 where its halves are zero, and what each of them changes."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foretell.drafters.heads.eagle2 import Eagle2
from foretell.drafters.heads.fspad import Fspad
from foretell.drafters.heads.networks.base import Drafted, Head, Nodes, Texts
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.errors import BadConfig
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.packed import pack_layers
from foretell.native import library
from tests.drafters.heads.networks.driving import trees
from tests.models.decoder.families import tiny

TEXT = [(11 * i + i * i) % 90 for i in range(15)]
WIDE = {  # sizes that the C library computes
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
HALVES: dict[str, dict[str, Any]] = {
    "both": {},
    "gate": {"adapter": False},
    "adapter": {"times": 0},
}


@cache
def llama() -> Decoder:
    return Decoder(tiny("llama"), "llama")


def head_of(kind: str = "fspad", learnt: bool = True, target: Any = None, **options: Any) -> Any:
    """Random weights; `learnt`: with halves that are not zero any more."""
    torch.manual_seed(3)
    head = build_head(kind, target_shape(target or llama()), options)
    if learnt:
        with torch.no_grad():
            for weight in head.parameters():
                weight += 0.2 * torch.randn_like(weight)
    return head


def batch(size: int = 2, length: int = 7) -> Texts:
    draw = torch.Generator().manual_seed(5)
    width = target_shape(llama()).hidden
    made = (torch.randn(size, length, width, generator=draw) for _ in range(3))
    return Texts(torch.randint(90, (size, length), generator=draw), *made)


def unrolled(head: Head, texts: Texts, depths: int = 3) -> list[Drafted]:
    return list(head.unroll_depths(texts, depths))


class Chain:
    """Attention of rows that come one by one, each of which sees all before it."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keys.append(k)
        self.values.append(v)
        keys, values = torch.cat(self.keys, 1), torch.cat(self.values, 1)
        mixed = F.scaled_dot_product_attention(q[None], keys[None], values[None], enable_gqa=True)
        return mixed[0].transpose(0, 1)


@torch.no_grad()
def stepwise(head: Head, texts: Texts, row: int, depths: int) -> list[torch.Tensor]:
    """What the first text's anchor `row` says at each depth, node by node."""
    attend, said = Chain(), []
    state = texts.features[0, :1]
    for place in range(row + depths):
        drafted = place > row
        features = state if drafted else texts.features[0, place : place + 1]
        nodes = Nodes(
            texts.embedded[0, place : place + 1],
            features,
            torch.tensor([drafted]),
            torch.tensor([place]),
        )
        read, state = head.step(nodes, attend)
        if place >= row:
            said.append(read[0])
    return said


def test_with_zero_halves_it_is_eagle_bit_for_bit() -> None:
    plain, head, texts = head_of("eagle"), head_of(learnt=False), batch()
    missing, unknown = head.load_state_dict(plain.state_dict(), strict=False)
    assert not unknown and {name.split(".")[0] for name in missing} == {"sampled", "apart"}
    for one, other in zip(unrolled(head, texts), unrolled(plain, texts), strict=True):
        assert one.feature is not None and other.feature is not None
        assert torch.equal(one.states, other.states) and torch.equal(one.feature, other.feature)


@pytest.mark.parametrize("half", ["sampled", "apart"])
def test_each_half_changes_what_it_says(half: str) -> None:
    head, texts = head_of(learnt=False), batch()
    before = unrolled(head, texts, 1)[0]
    with torch.no_grad():
        getattr(head, half).down_proj.weight += 0.1
    after = unrolled(head, texts, 1)[0]
    assert before.feature is not None and after.feature is not None
    assert not torch.allclose(before.states, after.states)
    assert torch.equal(before.feature, after.feature) == (half == "apart")


def test_the_regression_does_not_reach_the_adapter() -> None:
    head, texts = head_of(), batch()
    for drafted in unrolled(head, texts):
        assert drafted.feature is not None
        drafted.feature.square().sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert all(weight.grad is None for weight in head.apart.parameters())
    assert all(bool(weight.grad.any()) for weight in head.sampled.parameters())
    unrolled(head, texts, 1)[0].states.square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(bool(weight.grad.any()) for weight in head.apart.parameters())


@pytest.mark.parametrize("options", HALVES.values(), ids=HALVES)
def test_training_and_drafting_say_the_same(options: dict[str, Any]) -> None:
    head, texts, depths = head_of(**options), batch(), 3
    with torch.no_grad():
        taught = unrolled(head, texts, depths)
    for row in range(4):
        for drafted, said in zip(taught, stepwise(head, texts, row, depths), strict=True):
            torch.testing.assert_close(drafted.states[0, row], said, rtol=1e-3, atol=1e-3)


def test_nodes_below_are_given_the_estimate_not_what_the_matrix_reads() -> None:
    """A head that hands on the other is caught by the test above."""
    head, texts = head_of(), batch()
    right = unrolled(head, texts, 2)[1].states
    leaving = head.leave_layer
    head.leave_layer = lambda out: (leaving(out)[0],) * 2
    assert not torch.allclose(unrolled(head, texts, 2)[1].states, right, rtol=1e-2)


def test_its_size_is_that_of_its_halves() -> None:
    width = target_shape(llama()).hidden

    def size(*args: Any, **options: Any) -> int:
        return sum(weight.numel() for weight in head_of(*args, **options).parameters())

    plain = size("eagle")
    assert size(times=0, adapter=False) == plain
    assert size(times=3, adapter=False) - plain == 9 * width**2
    assert size(times=0) - plain == width**2


@pytest.mark.parametrize("options", [{"times": -1}, {"times": 1.5}, {"adapter": 2}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(BadConfig, match=f"fspad:{name}"):
        head_of(**options)


@pytest.mark.skipif(not library.is_available(), reason="no C library")
def test_the_library_leaves_it_to_torch(tmp_path: Path) -> None:
    """It would compute EAGLE-1 in its place, and that alone: seen where the halves are zero, and
    where they are not.
    """
    hf = tiny("llama", dtype=torch.bfloat16, **WIDE)
    pack_layers(hf, "int8")
    target: Any = Decoder(hf, "llama")
    plain, same = head_of("eagle", target=target), head_of(learnt=False, target=target)
    same.load_state_dict(plain.state_dict(), strict=False)
    other = copy.deepcopy(same)
    torch.nn.init.normal_(other.apart.down_proj.weight)

    def children(drafter: Any, head: Head) -> dict[int, float]:
        """The root's, and what they are worth."""
        save_head(head, None, tmp_path, target, {})
        made = drafter(head=str(tmp_path), depth=2, breadth=3, total=9)
        model: Any = made.bring({"target": target})["head"]
        library_computes = drafter is Eagle2
        assert (model.native is not None) == ("grows" in model.caps) == library_computes
        (tree, *_), _ = trees(made, target, TEXT)
        nodes = [node for node in range(1, len(tree)) if tree.parents[node] == 0]
        return {tree.tokens[node]: tree.values[node] for node in nodes}

    by_library = children(Eagle2, plain)
    assert children(Fspad, same) == pytest.approx(by_library, abs=0.1)
    assert children(Fspad, other) != pytest.approx(by_library, abs=0.1)
