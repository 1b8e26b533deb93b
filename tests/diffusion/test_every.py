"""What every method that fills canvases is held to."""

from __future__ import annotations

from typing import Any

import pytest

from foretell import registry
from foretell.core.masked_text import MASKS, NOISE
from foretell.errors import BadConfig, Unsupported
from foretell.testing.toy import Toy
from foretell.testing.toy_canvas import ToyCanvas, ToyNoise
from tests.diffusion.worlds import filled, text

NAMES = [
    name for name in registry.method_names("diffusion") if name != "learn2pd"
]  # it needs a file
every = pytest.mark.parametrize("name", NAMES)
PROMPTS = [(0,), (1, 2, 0), (3, 1)]
TOYS: dict[str, Any] = {MASKS: ToyCanvas, NOISE: ToyNoise}


def fills(name: str) -> str:
    """What a method fills."""
    return str(registry.load_method(name, "diffusion").needs[1])


def toy(name: str, **more: Any) -> Any:
    """A model that it is for."""
    return TOYS[fills(name)](**more)


@every
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_canvas_in_company_is_the_canvas_alone(name: str, temperature: float) -> None:
    model = toy(name)
    options = {"temperature": temperature, "max_new_tokens": 10, "seed": 3}
    together = filled(model, f"{name}:block=4", *PROMPTS, **options)
    for prompt, live in zip(PROMPTS, together, strict=True):
        assert list(live.ctx.output) == text(model, f"{name}:block=4", prompt, **options)
        assert len(live.ctx.output) == 10
        assert fills(name) == NOISE or model.mask_id not in live.ctx.output


@every
def test_blocks_are_the_models_own_where_none_are_asked_for(name: str) -> None:
    if registry.load_method(name, "diffusion").block == 0:
        pytest.skip("it fills all of a canvas")
    if name == "learn2pd":
        pytest.skip("blocks are those of its filter: see its own tests")
    options = {"temperature": 0.9, "max_new_tokens": 40, "seed": 3}
    for own, size in ((3, 3), (0, 32)):
        model = toy(name, block=own, seed=4)
        given = text(model, name, (2, 3), **options)
        assert given == text(model, f"{name}:block={size}", (2, 3), **options)
        assert given != text(model, f"{name}:block={35 - size}", (2, 3), **options)


@every
@pytest.mark.parametrize("shift", [0, 1])
def test_it_fills_what_is_left_between_given_tokens(name: str, shift: int) -> None:
    given = [2, -1, -1, 1, -1, 0]
    if fills(name) == NOISE and shift:
        pytest.skip("its rows speak of their own positions")
    model = toy(name, **({"shift": shift} if shift else {}))
    out = text(model, f"{name}:block=3", inputs={"canvas": given}, max_new_tokens=6)
    assert len(out) == 6 and -1 not in out
    assert [token for token, was in zip(out, given, strict=True) if was >= 0] == [2, 1, 0]


@every
def test_an_end_ends_it(name: str) -> None:
    whole = text(toy(name, seed=2), f"{name}:block=4", max_new_tokens=12)
    end = whole[5]
    cut = text(toy(name, seed=2), f"{name}:block=4", max_new_tokens=12, stop_token_ids=(end,))
    assert cut == whole[: whole.index(end) + 1]


@every
def test_what_it_cannot_honour_is_named(name: str) -> None:
    with pytest.raises(BadConfig, match="repetition_penalty"):
        text(toy(name), name, repetition_penalty=1.2)
    if fills(name) == MASKS:
        with pytest.raises(BadConfig, match="mask token"):
            text(toy(name), name, (0, 4))
    with pytest.raises(Unsupported, match="canvas"):
        text(Toy(), name)


@every
def test_another_noise_than_the_models_is_refused_with_a_method_for_it(name: str) -> None:
    other = MASKS if fills(name) == NOISE else NOISE
    cure = {MASKS: "threshold", NOISE: "renoise"}[other]
    with pytest.raises(Unsupported, match=f"it fills .*{cure}") as caught:
        text(TOYS[other](), name)
    assert "\n" not in str(caught.value)


def test_methods_that_write_from_left_to_right_are_refused() -> None:
    with pytest.raises(Unsupported, match="fills canvases"):
        text(ToyCanvas(), "suffix")
