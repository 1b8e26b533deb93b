"""The acceptance head: its blocks, its probabilities, its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.drafters.model.acceptance_head import (
    AcceptanceHead,
    load_acceptance_head,
    save_acceptance_head,
)
from foretell.errors import BadFile


def head(seed: int = 0, blocks: int = 3) -> AcceptanceHead:
    torch.manual_seed(seed)
    return AcceptanceHead(4, blocks)


def test_every_block_has_weights_of_its_own() -> None:
    """The published head repeats one block, so that all its layers are one."""
    made = head()
    parameters = list(made.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters) == 2 * 3 + 2
    states = torch.randn(5, 4)
    before = made.accept_chance(states)
    for block in made.blocks:
        weight = block.linear.weight  # type: ignore[union-attr]
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(torch.randn(4, 4))
        others = [b.linear.weight for b in made.blocks if b is not block]  # type: ignore[union-attr]
        assert not any(torch.equal(other, weight) for other in others)
        assert float((made.accept_chance(states) - before).abs().max()) > 1e-3
        with torch.no_grad():
            weight.copy_(kept)
    optimiser = torch.optim.SGD(made.parameters(), lr=1.0)
    made(states)[:, 0].sum().backward()
    optimiser.step()
    first, second, third = (block.linear.weight for block in made.blocks)  # type: ignore[union-attr]
    assert not torch.equal(first, second) and not torch.equal(second, third)


def test_its_blocks_are_residual_and_its_chances_those_of_two_classes() -> None:
    made = head(blocks=1)
    states = torch.tensor([[3.0, -1.0, 0.0, 2.0]])
    h = states / (14 / 4) ** 0.5
    (block,) = made.blocks
    inner = h @ block.linear.weight.T + block.linear.bias  # type: ignore[union-attr, operator]
    h = h + inner / (1 + torch.exp(-inner))
    rejected, accepted = (h @ made.out.weight.T + made.out.bias).exp()[0].tolist()
    assert float(made.accept_chance(states)[0]) == pytest.approx(
        accepted / (rejected + accepted), 1e-5
    )
    assert torch.allclose(made.accept_chance(states * 100), made.accept_chance(states), atol=1e-5)
    assert bool(made.accept_chance(torch.zeros(1, 4)).isfinite().all())
    assert torch.equal(made.accept_chance(states.double()), made.accept_chance(states))


def test_a_file_gives_the_head_again(tmp_path: Path) -> None:
    made = head(blocks=2)
    path = tmp_path / "new" / "head.safetensors"
    save_acceptance_head(made, path)
    again = load_acceptance_head(path)
    states = torch.randn(6, 4)
    assert (again.width, len(again.blocks)) == (4, 2)
    assert torch.equal(again.accept_chance(states), made.accept_chance(states))
    assert not any(p.requires_grad for p in again.parameters())


def test_a_file_that_is_no_head_is_one_line(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    save_acceptance_head(head(), good)
    tensors = load_file(good)
    about = {"schema": "foretell.acceptance-head/1", "width": "4", "blocks": "3"}
    cases = [
        (None, about, "cannot be read"),
        (tensors, {}, "no acceptance head"),
        (tensors, {**about, "schema": "foretell.acceptance-head/9"}, "no acceptance head"),
        (tensors, {**about, "width": "4000000"}, "not those of such a head"),
        (tensors, {**about, "width": "9" * 30}, "not those of such a head"),
        (
            {**tensors, "out.weight": torch.zeros(2, 1_000_000)},
            {**about, "width": "1000000"},
            "not those of such a head",
        ),
        (tensors, {**about, "width": "x"}, "no acceptance head"),
        (tensors, {**about, "blocks": "999999999"}, "no acceptance head"),
        (tensors, {**about, "blocks": "2"}, "not those of such a head"),
        ({k: v for k, v in tensors.items() if "1" not in k}, about, "not those of such a head"),
        ({**tensors, "out.bias": torch.tensor([0, torch.nan])}, about, "not a finite number"),
    ]
    for content, header, said in cases:
        if content is None:
            bad.write_bytes(good.read_bytes()[:-9])
        else:
            save_file(content, bad, header)
        with pytest.raises(BadFile) as caught:
            load_acceptance_head(bad)
        text = str(caught.value)
        assert said in text and str(bad) in text and "foretell train acceptance-head" in text
        assert "\n" not in text
    with pytest.raises(BadFile, match=r"cannot be read.*foretell train"):
        load_acceptance_head(tmp_path / "nowhere")
