"""A law of every method: fields have the values that their annotations allow, and no others."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from foretell import registry
from foretell.core.settings import Allowed, OneOf, Range, allowed_values
from foretell.errors import BadConfig

METHODS = sorted(
    key for key, path in registry.method_files().items() if path.is_relative_to(registry.PACKAGE)
)


def outside(allowed: Allowed, default: Any) -> list[Any]:
    """Values that are not allowed, as near as they can be to those that are."""
    if isinstance(allowed, OneOf):
        return ["none of them"]
    assert isinstance(allowed, Range)
    number = default[0] if isinstance(default, tuple) and default else default
    near = 1 if isinstance(number, int) else 1e-6
    values: list[Any] = []
    if allowed.low != -inf:
        values.append(allowed.low if allowed.open_low else allowed.low - near)
    if allowed.high != inf:
        values.append(allowed.high if allowed.open_high else allowed.high + near)
    return [(*default, value) if isinstance(default, tuple) else value for value in values]


def inside(allowed: Allowed, default: Any) -> list[Any]:
    """The ends of what is allowed."""
    if isinstance(allowed, OneOf):
        return list(allowed.values)
    assert isinstance(allowed, Range)
    ends = [] if allowed.open_low else [allowed.low]
    ends += [] if allowed.open_high else [allowed.high]
    ends = [end for end in ends if abs(end) != inf]
    return [(end,) if isinstance(default, tuple) else end for end in ends]


def objection(method: type, field: str, value: Any) -> str:
    """Why a method is not made with a value; empty if it is."""
    try:
        method(**{field: value})
    except BadConfig as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_fields_have_the_values_that_are_allowed(kind: str, name: str) -> None:
    method = registry.load_method(name, kind)
    for field, allowed in allowed_values(method).items():
        default = method.__dataclass_fields__[field].default  # type: ignore[attr-defined]
        assert default in allowed, f"{field}={default} is its default"
        for value in outside(allowed, default):
            sentence = objection(method, field, value)
            assert sentence.startswith(f"{name}:{field}="), f"{field}={value}: {sentence!r}"
            assert str(allowed) in sentence and "\n" not in sentence
        for value in inside(allowed, default):
            assert f"must be {allowed}" not in objection(method, field, value)


def test_most_numbers_have_a_range() -> None:
    """So that the law above is of something."""
    ranged = sum(len(allowed_values(registry.load_method(name, kind))) for kind, name in METHODS)
    assert ranged >= 300
