"""Its order looks at the drawn token, and its steps are shared among blocks."""

from __future__ import annotations

import pytest

from foretell.core.masked_text import Sheet
from foretell.testing.toy_canvas import Oracle, ToyCanvas
from tests.diffusion.worlds import UNEVEN, calls, check_bad, distance, filled, law


def test_it_looks_at_the_drawn_token_and_is_not_exact() -> None:
    found = law(Oracle(UNEVEN, vocab=3), "confidence:block=0", max_new_tokens=2)
    assert distance(found, UNEVEN) > 0.02


def test_steps_are_shared_among_blocks() -> None:
    for steps, forwards in ((0, 12), (12, 12), (6, 6), (3, 3), (1, 3)):
        (live,) = filled(ToyCanvas(), f"confidence:block=4,steps={steps}", max_new_tokens=12)
        assert calls(live) == forwards


@pytest.mark.parametrize(("block", "filled_first"), [(0, [3, 4, 5, 6]), (4, [3])])
def test_blocks_are_those_that_a_model_sees(
    block: int, filled_first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []
    commit = Sheet.commit

    def noted(sheet: Sheet, place: int, *about: float) -> None:
        places.append(place)
        commit(sheet, place, *about)  # type: ignore[arg-type]

    monkeypatch.setattr(Sheet, "commit", noted)
    filled(ToyCanvas(block=block), "confidence:block=4", (0, 1, 2), max_new_tokens=8)
    first = len(filled_first)
    assert sorted(places[:first]) == filled_first
    assert sorted(places[first : first + 4]) == [*range(3 + first, 7 + first)]


def test_bad_settings_are_named() -> None:
    check_bad("confidence:steps=-1", "confidence:block=-2")
