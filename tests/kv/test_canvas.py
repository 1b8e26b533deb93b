"""What planners of canvases are held to: see foretell/ops/planning.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.families.canvas import Denoiser
from foretell.families.toy_canvas import ToyCanvas
from foretell.ops.canvas import Sheet
from foretell.ops.planning import Planner
from tests.diffusion.worlds import filled, request, text
from tests.families.families import tiny

OFF = ["dkv:every=1", "window:refresh=1", "window:refresh=100,active=40,window=40"]
PARTS = ["prefix", "dual", "dkv", "dkv:every=3", "window:active=3,window=5,refresh=4"]


def denoiser(shift: int = 0, block: int = 0) -> Denoiser:
    return Denoiser(tiny("llama", dtype=torch.float64), "tiny", 95, shift, block)


@pytest.mark.parametrize("kv", OFF[:2])
@pytest.mark.parametrize("shift", [0, 1])
def test_off_it_is_the_baseline(kv: str, shift: int) -> None:
    model = ToyCanvas(shift=shift)
    for method in ("confidence:block=4", "threshold:tau=0.5,block=4", "random:block=0"):
        options = {"max_new_tokens": 12, "temperature": 0.8}
        assert text(model, method, kv=kv, **options) == text(model, method, **options)


@pytest.mark.parametrize("kv", PARTS)
@pytest.mark.parametrize("shift", [0, 1])
def test_some_rows_are_kept_and_that_shows(kv: str, shift: int) -> None:
    model = denoiser(shift)
    method = "confidence:block=0" if kv.startswith("window") else "confidence:block=4"
    differ = 0
    for prompt in ((5, 6), (7, 8, 9), (40, 3), (1, 80, 2, 60)):
        ours = text(model, method, prompt, kv=kv, max_new_tokens=12)
        assert len(ours) == 12
        differ += ours != text(model, method, prompt, max_new_tokens=12)
    assert differ


@pytest.mark.parametrize("kv", [None, *PARTS])
@pytest.mark.parametrize("block", [0, 4])
def test_company_changes_nothing(kv: str | None, block: int) -> None:
    model = denoiser(shift=1, block=block)
    prompts = [(5, 6, 7), (8, 9)]
    method = "confidence:block=4"
    options: dict[str, Any] = {"max_new_tokens": 8, "kv": kv}
    together = filled(model, method, *prompts, **options)
    for prompt, live in zip(prompts, together, strict=True):
        assert list(live.ctx.output) == text(model, method, prompt, **options)


def counted(kv: str, method: str, length: int) -> list[tuple[int, int, int]]:
    """(positions computed, positions read, masked ones) of every forward."""
    seen = []
    model = ToyCanvas()
    made = request(model, method, kv=kv, max_new_tokens=length)
    engine = Engine({"target": model})
    live = engine.add(made)
    run = model.forward

    def forward(jobs: Any) -> Any:
        (job,) = jobs
        read = job.length if job.attended is None else len(job.attended)
        seen.append((len(job.tokens), read, len(live.ctx.output)))
        return run(jobs)

    model.forward = forward  # type: ignore[method-assign]
    for _ in engine.run():
        pass
    assert live.error is None
    return seen


def test_prefix_and_dual_compute_the_block_alone() -> None:
    ours = [computed for computed, _, _ in counted("dual", "confidence:block=4", 8)]
    assert ours == [9, 4, 4, 4, 9, 4, 4, 4]
    ours = [computed for computed, _, _ in counted("prefix", "confidence:block=4", 8)]
    assert ours == [9, 8, 8, 8, 9, 4, 4, 4]


def test_rows_of_committed_tokens_are_kept_one_step_late() -> None:
    """The canvas's less the cached: a step behind step i has i - 1 tokens less to compute, the
    prompt aside."""
    ours = [computed for computed, _, _ in counted("dkv:every=100", "confidence:block=0", 8)]
    assert ours == [9, 9, *[9 - 1 - step for step in range(1, 7)]]


def test_only_active_rows_are_computed_and_far_masks_are_not_read() -> None:
    kv = "window:active=3,window=5,refresh=6"
    ours = counted(kv, "confidence:block=0", 12)
    assert [computed for computed, _, _ in ours[:6]] == [13, 4, 5, 6, 6, 6]
    # The prompt, the token of the first step, and five masks.
    assert [read for _, read, _ in ours[:6]] == [13, 7, 7, 7, 7, 7]


def test_tokens_that_are_committed_beyond_the_window_stay() -> None:
    planner = request(ToyCanvas(), "confidence", kv="window:active=2,window=3").policy
    assert isinstance(planner, Planner)
    sheet = Sheet([0, *[-1] * 10], 1)
    planner.start(sheet)
    planner.plan(sheet, (1, 11), sheet.masked)
    sheet.commit(9, 2, 0.5)
    view = planner.plan(sheet, (1, 11), sheet.masked)
    assert list(view.attended or ()) == [0, 1, 2, 3, 9]
    assert list(view.computed or ()) == [1, 2, 9] and list(view.wanted) == [1, 2]


def test_the_order_has_to_be_known_where_neighbours_are_computed() -> None:
    assert len(text(ToyCanvas(), "random:block=0", kv="dkv:mode=greedy")) == 8
    with pytest.raises(BadConfig, match="method=random"):
        text(ToyCanvas(), "confidence", kv="dkv:mode=greedy")


def test_policies_of_other_caches_are_refused() -> None:
    with pytest.raises(Unsupported, match="fills canvases"):
        kv_policy("dual")
    with pytest.raises(Unsupported):
        text(denoiser(), "confidence", (5, 6), kv="tova:budget=8")


def kv_policy(kv: str) -> None:
    from foretell.families.toy import Toy

    request(Toy(), "plain", kv=kv)
