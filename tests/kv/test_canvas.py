"""What planners of canvases are held to: see foretell/diffusion/planner.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.engine.engine import Engine
from foretell.errors import Unsupported
from foretell.models.diffusion.canvas import Denoiser
from foretell.testing.toy_canvas import ToyCanvas
from tests.diffusion.worlds import filled, request, text
from tests.kv import published
from tests.models.decoder.families import tiny

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


@pytest.mark.parametrize("kv", OFF[:2])
@pytest.mark.parametrize("shift", [0, 1])
def test_off_all_rows_are_those_of_now(kv: str, shift: int) -> None:
    """On a transformer, whose rows differ from forward to forward."""
    model = denoiser(shift)
    for prompt in ((5, 6), (7, 8, 9)):
        ours = text(model, "confidence:block=4", prompt, kv=kv, max_new_tokens=9)
        assert ours == text(model, "confidence:block=4", prompt, max_new_tokens=9)


RULES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "dkv:every=100": (6, published.dkv, {"every": 100}),
    "dkv:every=3": (6, published.dkv, {"every": 3}),
    "dual": (4, published.fast, {"whole": False}),
    "prefix": (4, published.fast, {"whole": True}),
    "window:active=3,window=5,refresh=6": (
        12,
        published.window,
        {"active": 3, "window": 5, "refresh": 6},
    ),
    "window:active=2,window=40,refresh=100": (
        12,
        published.window,
        {"active": 2, "window": 40, "refresh": 100},
    ),
}


@pytest.mark.parametrize("kv", RULES)
def test_texts_are_those_of_the_published_rule(kv: str) -> None:
    """Written down by itself, in tests/kv/published.py."""
    model = denoiser()
    block, rule, given = RULES[kv]
    method = f"confidence:block={0 if rule is published.window else block}"
    for prompt in ((5, 6), (1, 80, 2, 60)):
        theirs = published.filled(model.hf, prompt, 12, block, rule, **given)
        assert text(model, method, prompt, kv=kv, max_new_tokens=12) == theirs


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


def test_policies_of_other_caches_are_refused() -> None:
    with pytest.raises(Unsupported, match="fills canvases"):
        kv_policy("dual")
    with pytest.raises(Unsupported):
        text(denoiser(), "confidence", (5, 6), kv="tova:budget=8")


def kv_policy(kv: str) -> None:
    from foretell.testing.toy import Toy

    request(Toy(), "plain", kv=kv)
