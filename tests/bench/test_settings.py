"""Settings outside their range."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.bench.settings import Settings
from foretell.errors import BadConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"requests": (0,)},
        {"methods": ()},
        {"models": ("a", "a")},
        {"max_new_tokens": 1},
        {"temperatures": (-1.0,)},
        {"contexts": (0,)},
        {"contexts": (5, 5)},
        {"peers": ("transformer",)},
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadConfig):
        Settings(**wrong)
