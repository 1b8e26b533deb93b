"""Only the first masked positions are computed, and far ones are not read."""

from __future__ import annotations

import pytest

from foretell.core.masked_text import Sheet
from foretell.diffusion.planner import Planner
from foretell.errors import BadConfig
from foretell.testing.toy_canvas import ToyCanvas
from tests.diffusion.worlds import request, text
from tests.kv.test_canvas import counted


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
    planner.start_canvas(sheet)
    planner.plan_view(sheet, (1, 11), sheet.masked)
    sheet.commit(9, 2, 0.5)
    view = planner.plan_view(sheet, (1, 11), sheet.masked)
    assert list(view.attended or ()) == [0, 1, 2, 3, 9]
    assert list(view.computed or ()) == [1, 2, 9] and list(view.requested) == [1, 2]


def test_bad_settings_are_named() -> None:
    for bad in ("window:active=0", "window:active=9,window=8", "window:refresh=0"):
        with pytest.raises(BadConfig, match="window"):
            text(ToyCanvas(), "confidence", kv=bad)
