"""What fields may have is checked when a method is made, and said in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from typing import Annotated, Any

import numpy as np
import pytest

from foretell.core.settings import OneOf, Range, Settings, allowed_values, bare_type
from foretell.drafters.lookup.ngram import Ngram
from foretell.drafters.model.draft import Draft
from foretell.drafters.model.s2d import S2D
from foretell.errors import BadConfig
from foretell.guidance.cfg import Cfg
from foretell.kv.evict.snapkv import Snapkv
from foretell.kv.select.quest import Quest


@dataclass(frozen=True)
class Fields(Settings):
    k: Annotated[int, Range(1, 64)] = 8
    share: Annotated[float, Range(0, 1, open_high=True)] = 0.5
    counts: Annotated[tuple[int, ...], Range(1)] = (2,)
    mode: Annotated[str, OneOf(("fast", "slow"))] = "fast"
    free: int = 0


@dataclass(frozen=True)
class Free(Settings):
    free: int = 0


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (Range(1, 64), "between 1 and 64"),
        (Range(1, 65536), "between 1 and 65,536"),
        (Range(), "a number"),
        (Range(1), "at least 1"),
        (Range(high=3), "at most 3"),
        (Range(0, 1, open_low=True), "above 0 and at most 1"),
        (Range(0, 1, open_high=True), "at least 0 and below 1"),
        (Range(0, open_low=True), "above 0"),
        (OneOf((8, 16)), "one of 8, 16"),
    ],
)
def test_what_is_allowed_is_said_in_words(allowed: Range | OneOf, words: str) -> None:
    assert str(allowed) == words


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("k", 0), ("k", 65), ("k", nan), ("share", 1), ("share", -0.1), ("share", inf)),
        *(("counts", (2, 0)), ("mode", "quick")),
    ],
)
def test_another_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(
        BadConfig, match=rf"^test-settings:{field}=.* {allowed_values(Fields)[field]}"
    ):
        Fields(**{field: value})  # type: ignore[arg-type]


def test_ends_are_allowed() -> None:
    assert Fields(1, 0, (1,), "slow") and Fields(64, 0.999, (), "fast", -5) and Free(-1)


def test_a_type_is_had_without_what_is_allowed() -> None:
    assert bare_type(Annotated[int, Range(1)]) is int
    assert bare_type(Annotated[int, "ids"]) == Annotated[int, "ids"] and bare_type(str) is str
    assert allowed_values(Free) == {}


@pytest.mark.parametrize(
    ("method", "fields", "said"),
    [
        (Ngram, {"n": (3,)}, r"ngram:n=\(3,\): must be a whole number, between 1 and 64"),
        (Ngram, {"n": True}, "ngram:n=True: must be a whole number"),
        (Ngram, {"n": 10**5000}, "ngram:n=a number of thousands of digits: must be"),
        (S2D, {"thresholds": 0.5}, "s2d:thresholds=0.5: must be numbers, each at least 0"),
        (Snapkv, {"budget": "3"}, "snapkv:budget='3': must be a whole number"),
        (Draft, {"best": "no"}, "draft:best='no': must be true or false"),
        (Cfg, {"g": np.ones(2)}, "cfg:g=array"),
        (Quest, {"page": 1 << 80}, "quest:page=.*: must be a whole number, at least 2"),
    ],
)
def test_values_of_another_type_are_refused(
    method: Callable[..., Any], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadConfig, match=f"^{said}"):
        method(**fields)


def test_the_types_of_a_class_whose_names_are_gone_are_not_looked_at() -> None:
    class Gone:
        pass

    @dataclass(frozen=True)
    class Own(Settings):
        value: Gone | None = None
        count: int = 3

    assert Own(count="x").count == "x"  # type: ignore[arg-type]
