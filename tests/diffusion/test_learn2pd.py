"""A filter's tokens, its oracle, and canvases that are cut at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.api.lm import LM
from foretell.diffusion.block_filter import BlockFilter, load_filter, save_filter
from foretell.errors import BadConfig, BadFile
from foretell.testing.toy_canvas import Oracle, ToyCanvas
from foretell.train.diffusion.filter import Replay, TrainFilter, collect_steps, fit_filter, roc_area
from tests.diffusion.worlds import calls, filled, text
from tests.kv.test_canvas import denoiser


def made(place: Path, model: Any, block: int = 4, bias: float = 0.0) -> str:
    """A filter that passes where the probability is above .5, or, by `bias`, always or never."""
    own = BlockFilter(block)
    with torch.no_grad():
        for layer in (own.first, own.second):
            layer.weight.copy_(torch.eye(block))
            layer.bias.zero_()
        own.second.weight.mul_(100)
        own.second.bias.fill_(-50 + bias)
    path = place / f"{block}{bias}.safetensors"
    save_filter(own, path, model)
    return str(path)


def test_it_has_2112_numbers_and_pads_with_zeros() -> None:
    own = BlockFilter(32)
    assert sum(p.numel() for p in own.parameters()) == 2112
    chances = torch.rand(32)
    chances[20:] = 0
    assert torch.equal(own(chances)[:20], own(chances[:20]))


def test_never_sure_it_is_one_token_a_step(tmp_path: Path) -> None:
    for seed in range(4):
        model = ToyCanvas(seed=seed)
        path = made(tmp_path, model)
        options = {"max_new_tokens": 10, "temperature": 0.5, "seed": seed}
        (ours,) = filled(model, f"learn2pd:block=4,tau=1,crop=false,filter={path}", **options)
        (base,) = filled(model, "confidence:block=4", **options)
        assert ours.ctx.output == base.ctx.output and calls(ours) == calls(base)


def test_what_it_says_is_final_is_committed_together(tmp_path: Path) -> None:
    model = ToyCanvas(sharpness=9.0)
    files = [made(tmp_path, model, bias=bias) for bias in (0, 99)]
    sure, always = (f"learn2pd:block=4,crop=false,filter={path}" for path in files)
    (ours,) = filled(model, sure, max_new_tokens=12)
    (threshold,) = filled(model, "threshold:block=4,tau=0.53", max_new_tokens=12)
    assert ours.ctx.output == threshold.ctx.output and calls(ours) == calls(threshold) < 12
    (all_at_once,) = filled(model, always, max_new_tokens=12)
    assert calls(all_at_once) == 3


def widths(chance: float, place: Path, crop: bool) -> tuple[list[int], list[int]]:
    """The text of a model that foresees an end with this probability, and positions by forward."""
    texts = {(0, 1, 3, 3, 3, 3, 3, 3): chance, (1, 0, 1, 0, 1, 0, 1, 0): 1 - chance}
    model = Oracle(texts, vocab=5)
    path = made(place, model, bias=-1000)
    seen: list[int] = []
    forward = model.forward

    def noted(jobs: Any) -> Any:
        seen.append(len(jobs[0].tokens))
        return forward(jobs)

    model.forward = noted  # type: ignore[method-assign]
    method = f"learn2pd:block=4,tau=1,crop={str(crop).lower()},filter={path}"
    return text(model, method, max_new_tokens=8, stop_token_ids=(3,)), seen


def test_the_canvas_is_cut_at_its_end(tmp_path: Path) -> None:
    cut, fewer = widths(0.98, tmp_path, True)
    whole, all_of_them = widths(0.98, tmp_path, False)
    assert cut == whole == [0, 1, 3]
    assert fewer == [9, 4, 4] and all_of_them == [9, 9, 9]


def test_an_unsure_end_cuts_nothing(tmp_path: Path) -> None:
    cut, seen = widths(0.6, tmp_path, True)
    assert cut == [0, 1, 3]
    assert seen == [9, 9, 4]  # cut once the first token has settled it


def test_the_oracle_commits_only_what_stays(tmp_path: Path) -> None:
    model = denoiser()
    lm = LM(model)
    config = TrainFilter(block=4, length=12)
    prompts = [[5, 6], [7, 8, 9], [40, 3], [1, 80, 2]]
    examples = collect_steps(lm, prompts, config)
    answer = lm.generate(prompts[0], method="confidence:block=4", max_new_tokens=12).tokens
    replay = Replay(block=4, answer=tuple(answer))
    again = lm.generate(prompts[0], method=replay, max_new_tokens=12)
    assert again.tokens == answer
    assert len(replay.examples) <= 12 and all(len(e.final) == 4 for e in replay.examples)
    own, report = fit_filter(examples, TrainFilter(block=4, length=12, epochs=200))
    assert 0 <= report["auc"] <= 1 and report["examples"] == len(examples)
    path = tmp_path / "own.safetensors"
    save_filter(own, path, model)
    again = load_filter(path, model)
    assert torch.equal(again.first.weight, own.first.weight)


def test_it_learns_what_chances_do_not_tell() -> None:
    """Final are the second halves of blocks, whatever their probabilities."""
    from foretell.train.diffusion.filter import Example

    torch.manual_seed(0)
    examples = []
    for _ in range(300):
        final = torch.tensor([False, False, True, True]) ^ (torch.rand(4) < 0.05)
        examples.append(Example(torch.rand(4), final, torch.ones(4, dtype=torch.bool)))
    _, report = fit_filter(examples, TrainFilter(block=4, length=4, epochs=400))
    assert report["auc"] > 0.85 > 0.7 > report["auc_of_chances"]


def test_the_area_counts_pairs() -> None:
    scores, labels = torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert roc_area(scores, labels) == pytest.approx((1 + 0.5 + 1 + 1) / 4)


def test_bad_filters_are_named(tmp_path: Path) -> None:
    model = denoiser()
    with pytest.raises(BadConfig, match="train filter"):
        text(model, "learn2pd:block=4", (5, 6))
    path = made(tmp_path, model)
    with pytest.raises(BadConfig, match="block"):
        text(model, f"learn2pd:block=8,filter={path}", (5, 6))
    own = text(model, f"learn2pd:filter={path}", (5, 6))  # blocks are the filter's
    assert own == text(model, f"learn2pd:block=4,filter={path}", (5, 6))
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"no file")
    with pytest.raises(BadFile, match="cannot be read"):
        text(model, f"learn2pd:block=4,filter={other}", (5, 6))
    with pytest.raises(BadFile, match="another model"):
        text(ToyCanvas(), f"learn2pd:block=4,filter={path}", (0,))
