"""Settings of a method: a frozen dataclass whose fields say which values they may have.

    k: Annotated[int, Range(1, 64)] = 10  # tokens of a draft at most

What the annotation says is checked when the method is made, stands on its page, and is tested of
every method there is. What depends on two fields is checked in the method's own `__post_init__`,
which calls that of its base first.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from numbers import Integral, Real
from typing import Any, get_type_hints

from foretell.errors import BadConfig

LARGEST = 1 << 62  # of whole numbers: others take memory, or overflow elsewhere


class Allowed(ABC):
    """Values that a field may have, which are said in words where it has another."""

    @abstractmethod
    def __contains__(self, value: Any) -> bool: ...

    @abstractmethod
    def __str__(self) -> str: ...


@dataclass(frozen=True)
class Range(Allowed):
    """Numbers from `low` to `high`, both included; of a field of several numbers, each of them.

    `open_low`, `open_high`: that end itself is left out.
    """

    low: float = -inf
    high: float = inf
    open_low: bool = False
    open_high: bool = False
    # As the field's type says: whole numbers, several of them.
    whole: bool = False
    several: bool = False

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, tuple):
            return all(number in self for number in value)
        above = self.low < value if self.open_low else self.low <= value
        below = value < self.high if self.open_high else value <= self.high
        return bool(above and below)

    def __str__(self) -> str:
        low, high = f"{self.low:,}".removesuffix(".0"), f"{self.high:,}".removesuffix(".0")
        if not (self.open_low or self.open_high) and inf not in (-self.low, self.high):
            return f"between {low} and {high}"
        ends = []
        if self.low != -inf:
            ends.append(f"{'above' if self.open_low else 'at least'} {low}")
        if self.high != inf:
            ends.append(f"{'below' if self.open_high else 'at most'} {high}")
        return " and ".join(ends) or "a number"


@dataclass(frozen=True)
class Odd(Range):
    """Odd numbers from `low` to `high`."""

    def __contains__(self, value: Any) -> bool:
        return super().__contains__(value) and value % 2 == 1

    def __str__(self) -> str:
        return f"an odd number, {super().__str__()}"


@dataclass(frozen=True)
class OneOf(Allowed):
    """A choice among some texts or numbers."""

    values: tuple[Any, ...]

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"


class Settings:
    """The base of every method's settings."""

    @property
    def method_name(self) -> str:
        """The method as users call it: by its file, of a class derived from it too."""
        own: Any = type(self)
        return name_of_method(own)

    def __post_init__(self) -> None:
        """Raises BadConfig for a field with a value that its annotation does not allow."""
        own: Any = type(self)
        for field, kind in plain_types(own).items():
            check_type(f"{self.method_name}:{field}", getattr(self, field), kind)
        for field, valid_values in allowed_values(own).items():
            check_value(f"{self.method_name}:{field}", getattr(self, field), valid_values)


def check_value(name: str, value: Any, allowed: Allowed) -> None:
    """Raises BadConfig for a value that a field of this name may not have."""
    if isinstance(allowed, Range):
        kind = "whole number" if allowed.whole else "number"
        expected = f"{kind}s, each {allowed}" if allowed.several else f"a {kind}, {allowed}"
        numbers = value if allowed.several else (value,)
        fits = isinstance(numbers, tuple) and all(_is_number(n, allowed.whole) for n in numbers)
        if not fits:
            raise BadConfig.field(name, value, expected.removesuffix(", a number"))
    try:
        is_allowed = value in allowed
    except (TypeError, ValueError):  # an array, say, has no place among them
        is_allowed = False
    if not is_allowed:
        raise BadConfig.field(name, value, str(allowed))


def check_type(name: str, value: Any, kind: type) -> None:
    """Raises BadConfig for a value that is not of a field's plain type."""
    expected, has_type = PLAIN_TYPES[kind]
    if not has_type(value):
        raise BadConfig.field(name, value, expected)


def _is_number(value: Any, whole: bool) -> bool:
    """Whether a value is a number, and none that only Python can hold."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        return False
    return not isinstance(value, int) or abs(value) < LARGEST


@cache
def name_of_method(settings: Any) -> str:
    """What users call the method of a class: the nearest of ours that it is or derives from."""
    modules = [cls.__module__ for cls in settings.__mro__ if "__dataclass_fields__" in vars(cls)]
    module = next((name for name in modules if name.startswith("foretell.")), settings.__module__)
    return str(module).rpartition(".")[2].replace("_", "-")


# Types of fields that are told from others at once: in words, and whether a value has it.
PLAIN_TYPES: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: _is_number(value, True)),
    float: ("a number", lambda value: _is_number(value, False)),
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
}


@cache
def plain_types(settings: Any) -> dict[str, type]:
    """The plain types of a dataclass's fields, of those without allowed values."""
    try:
        hints = get_type_hints(settings)
    except NameError:  # of a class in a function, whose names are gone
        return {}
    ranged = allowed_values(settings)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(settings)
        if hints[field.name] in PLAIN_TYPES and field.name not in ranged
    }


@cache
def allowed_values(settings: Any) -> dict[str, Allowed]:
    """Allowed values of a dataclass's fields, of those whose annotations give them."""
    if not any("Annotated[" in str(field.type) for field in dataclasses.fields(settings)):
        return {}
    hints = get_type_hints(settings, include_extras=True)
    allowed: dict[str, Allowed] = {}
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        for entry in getattr(hint, "__metadata__", ()):
            if isinstance(entry, Range):
                kind = bare_type(hint)
                several = kind in (tuple[int, ...], tuple[float, ...])
                whole = kind in (int, tuple[int, ...])
                allowed[field.name] = dataclasses.replace(entry, whole=whole, several=several)
            elif isinstance(entry, Allowed):
                allowed[field.name] = entry
    return allowed


def bare_type(hint: Any) -> Any:
    """A field's type without what its annotation says of its values."""
    entries = getattr(hint, "__metadata__", ())
    return hint.__origin__ if any(isinstance(e, Allowed) for e in entries) else hint
