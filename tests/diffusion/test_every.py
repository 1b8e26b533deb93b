"""What every method that fills canvases is held to."""

from __future__ import annotations

import pytest

from foretell import registry
from foretell.errors import BadConfig, Unsupported
from foretell.families.toy import Toy
from foretell.families.toy_canvas import Oracle, ToyCanvas, replacements, shuffles
from foretell.ops.canvas import Sheet
from tests.diffusion.worlds import calls, distance, filled, law, text

NAMES = [name for name in registry.names("diffusion") if name != "learn2pd"]  # it needs a file
every = pytest.mark.parametrize("name", NAMES)
PROMPTS = [(0,), (1, 2, 0), (3, 1)]


@every
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_canvas_in_company_is_the_canvas_alone(name: str, temperature: float) -> None:
    model = ToyCanvas()
    options = {"temperature": temperature, "max_new_tokens": 10, "seed": 3}
    together = filled(model, f"{name}:block=4", *PROMPTS, **options)
    for prompt, live in zip(PROMPTS, together, strict=True):
        assert list(live.ctx.output) == text(model, f"{name}:block=4", prompt, **options)
        assert len(live.ctx.output) == 10 and model.mask_id not in live.ctx.output


@every
@pytest.mark.parametrize("shift", [0, 1])
def test_it_fills_what_is_left_between_given_tokens(name: str, shift: int) -> None:
    given = [2, -1, -1, 1, -1, 0]
    model = ToyCanvas(shift=shift)
    out = text(model, f"{name}:block=3", inputs={"canvas": given}, max_new_tokens=6)
    assert len(out) == 6 and -1 not in out
    assert [token for token, was in zip(out, given, strict=True) if was >= 0] == [2, 1, 0]


@every
def test_an_end_ends_it(name: str) -> None:
    whole = text(ToyCanvas(seed=2), f"{name}:block=4", max_new_tokens=12)
    end = whole[5]
    cut = text(ToyCanvas(seed=2), f"{name}:block=4", max_new_tokens=12, stop_token_ids=(end,))
    assert cut == whole[: whole.index(end) + 1]


@every
def test_what_it_cannot_honour_is_named(name: str) -> None:
    with pytest.raises(BadConfig, match="repetition_penalty"):
        text(ToyCanvas(), name, repetition_penalty=1.2)
    with pytest.raises(BadConfig, match="mask token"):
        text(ToyCanvas(), name, (0, 4))
    with pytest.raises(Unsupported, match="canvas"):
        text(Toy(), name)


def test_methods_that_write_from_left_to_right_are_refused() -> None:
    with pytest.raises(Unsupported, match="fills canvases"):
        text(ToyCanvas(), "suffix")


EXACT = ("random", "margin", "entropy")
LISTS = {"shuffle": shuffles([0, 1, 2]), "replace": replacements([0, 1, 2, 3], 4)}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("task", LISTS)
def test_one_token_a_step_draws_from_the_joint_law(name: str, task: str) -> None:
    texts = LISTS[task]
    model = Oracle(texts, vocab=6)
    found = law(model, f"{name}:block=0", max_new_tokens=len(next(iter(texts))))
    assert distance(found, texts) < 1e-9


def test_confidence_looks_at_the_drawn_token_and_is_not_exact() -> None:
    texts = {(0, 0): 0.5, (0, 1): 0.2, (1, 0): 0.3}
    model = Oracle(texts, vocab=3)
    found = law(model, "confidence:block=0", max_new_tokens=2)
    assert distance(found, texts) > 0.02
    for name in EXACT:
        assert distance(law(model, f"{name}:block=0", max_new_tokens=2), texts) < 1e-9


@pytest.mark.parametrize(
    ("texts", "steps", "chance"),
    [
        (shuffles([0, 1, 2, 3]), 1, 0.09375),
        (shuffles([0, 1, 2, 3]), 2, 0.375),
        (replacements([0, 1, 2, 3], 4), 1, 0.4219),
    ],
    ids=["shuffle at once", "shuffle in two", "replace at once"],
)
def test_tokens_that_are_drawn_together_miss_by_what_theory_says(
    texts: dict[tuple[int, ...], float], steps: int, chance: float
) -> None:
    model = Oracle(texts, vocab=6)
    found = law(model, f"entropy:block=0,steps={steps}", max_new_tokens=4)
    right = sum(share for t, share in found.items() if t in texts)
    assert right == pytest.approx(chance, abs=1e-4)


def test_steps_are_shared_among_blocks() -> None:
    for steps, forwards in ((0, 12), (12, 12), (6, 6), (3, 3), (1, 3)):
        (live,) = filled(ToyCanvas(), f"confidence:block=4,steps={steps}", max_new_tokens=12)
        assert calls(live) == forwards


@pytest.mark.parametrize("off", ["threshold:tau=2", "factor:f=0", "entropy-bound:gamma=0"])
def test_without_room_for_more_it_commits_one_token_a_step(off: str) -> None:
    base = "entropy" if "gamma" in off else "confidence"
    for seed in range(6):
        model = ToyCanvas(seed=seed)
        options = {"max_new_tokens": 9, "temperature": 0.7, "seed": seed}
        (ours,) = filled(model, f"{off},block=4", **options)
        (plain,) = filled(model, f"{base}:block=4", **options)
        assert ours.ctx.output == plain.ctx.output and calls(ours) == calls(plain) == 9


def test_sure_tokens_are_committed_together() -> None:
    model = Oracle({(0, 1, 2, 3): 0.97, (3, 2, 1, 0): 0.03}, vocab=5)
    for method in ("threshold:tau=0.9", "factor", "entropy-bound:gamma=0.5"):
        (live,) = filled(model, method, max_new_tokens=4)
        assert list(live.ctx.output) == [0, 1, 2, 3] and calls(live) == 1


# --- taking tokens back


def test_without_further_steps_nothing_is_taken_back() -> None:
    for seed in range(4):
        model = ToyCanvas(seed=seed)
        ours = text(model, "remdm:further=0,block=4,steps=6", max_new_tokens=12)
        assert ours == text(model, "confidence:block=4,steps=6", max_new_tokens=12)


@pytest.mark.parametrize("method", ["remdm:further=3,block=4", "rcr:steps=6,block=4"])
def test_tokens_are_taken_back_and_filled_anew(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = []
    mask = Sheet.mask
    monkeypatch.setattr(Sheet, "mask", lambda self, place: (back.append(place), mask(self, place)))
    changed = 0
    for seed in range(4):
        model = ToyCanvas(seed=seed)
        back.clear()
        (live,) = filled(model, method, max_new_tokens=12, temperature=0.9, seed=seed)
        steps = 12 + 3 * 3 if method.startswith("remdm") else 6
        assert back and calls(live) == steps and len(live.ctx.output) == 12
        base = text(model, "confidence:block=4", max_new_tokens=12, temperature=0.9, seed=seed)
        changed += list(live.ctx.output) != base
    assert changed


def test_what_was_drawn_again_is_another_draw() -> None:
    """The enumerator refuses a key that is used twice."""
    model = ToyCanvas(vocab=3)
    for method in ("remdm:further=1,block=0", "rcr:steps=2,block=0"):
        found = law(model, method, max_new_tokens=3)
        assert sum(found.values()) == pytest.approx(1, abs=1e-9)
