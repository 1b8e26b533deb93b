"""Small programming tasks that are made here: what a function does, public and hidden tests.

Each kind draws its numbers or letters, and has a reference that says what its function gives. A
task says in words what is wanted and shows the public tests as examples; the hidden ones call the
function with other arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.errors import BadConfig
from foretell.rewards.cases import Case
from foretell.rewards.sandbox import FunctionCall

PUBLIC, HIDDEN = 3, 5  # tests of a task
# A function's body is over where one of these begins.
STOPS = ("\ndef ", "\nclass ", "\n#", "\nif ", "\nprint", "\nassert", "\n>>>", "\n```", "\n@")
WORDS = "apple river stone cloud lemon tiger window garden purple silver candle button".split()


@dataclass(frozen=True)
class Program:
    """A task: a function of some kind, its arguments, what it does, and tests of it."""

    kind: str
    arguments: str
    says: str
    public: tuple[Case, ...]
    hidden: tuple[Case, ...]

    @property
    def begins(self) -> str:
        """The line that a program begins with."""
        return f"def {self.kind}({self.arguments}):"

    @property
    def question(self) -> str:
        """The task in words, with the public tests, for a chat model."""
        shown = "\n".join(f"{call} == {value}" for call, value in self.examples)
        function = f"`{self.kind}({self.arguments})`"
        return f"Write a Python function {function}. {self.says}\n\nExamples:\n{shown}"

    @property
    def head(self) -> str:
        """The same as the first lines of a program, for a model that continues texts."""
        shown = "\n".join(f"    >>> {call}\n    {value}" for call, value in self.examples)
        return f'{self.begins}\n    """{self.says}\n\n{shown}\n    """'

    @property
    def examples(self) -> list[tuple[str, str]]:
        """Of the public tests the call and the value."""
        return [
            (f"{self.kind}({', '.join(map(repr, test.call.args))})", repr(test.expected))
            for test in self.public
        ]


@dataclass(frozen=True)
class Kind:
    """A sort of function: its arguments, what it does, an argument's values, and the reference."""

    arguments: str
    says: str
    draw: Callable[[random.Random], tuple[Any, ...]]
    reference: Callable[..., Any]


def programs(count: int, seed: int) -> list[Program]:
    """So many different tasks, of all kinds in turn. Raises BadConfig where there are fewer."""
    draw = random.Random(seed)
    found: dict[str, Program] = {}
    makers = list(KINDS)
    for attempt in range(20 * count + 100):
        if len(found) == count:
            return list(found.values())
        name = makers[attempt % len(makers)]
        kind = KINDS[name](draw)
        if (key := f"{name}: {kind.says}") not in found:
            found[key] = _made(name, kind, draw)
    raise BadConfig(f"{count} different tasks cannot be made; take fewer")


def _made(name: str, kind: Kind, draw: random.Random) -> Program:
    calls: dict[str, tuple[Any, ...]] = {}
    while len(calls) < PUBLIC + HIDDEN:
        arguments = kind.draw(draw)
        calls.setdefault(repr(arguments), arguments)
    tests = [
        Case(FunctionCall(name, arguments), kind.reference(*arguments))
        for arguments in calls.values()
    ]
    public, hidden = tuple(tests[:PUBLIC]), tuple(tests[PUBLIC:])
    return Program(name, kind.arguments, kind.says, public, hidden)


# --- what arguments are drawn from


def _number(low: int, high: int) -> Callable[[random.Random], tuple[Any, ...]]:
    return lambda draw: (draw.randint(low, high),)


def _numbers(least: int = 3) -> Callable[[random.Random], tuple[Any, ...]]:
    return lambda draw: ([draw.randint(0, 30) for _ in range(draw.randint(least, least + 4))],)


def _words(draw: random.Random) -> Sequence[str]:
    return draw.sample(WORDS, draw.randint(2, 4))


def _text(draw: random.Random) -> tuple[Any, ...]:
    return (" ".join(_words(draw)),)


def _list_of_words(draw: random.Random) -> tuple[Any, ...]:
    return (list(_words(draw)),)


# --- the kinds


def _linear(draw: random.Random) -> Kind:
    a, b = draw.randint(2, 9), draw.randint(1, 9)
    says = f"Return {a} times x minus {b}."
    return Kind("x", says, _number(-20, 20), lambda x: a * x - b)


def _limited(draw: random.Random) -> Kind:
    low, high = draw.randint(0, 9), draw.randint(15, 30)
    says = f"Return x, but at least {low} and at most {high}."
    return Kind("x", says, _number(-5, 40), lambda x: max(low, min(high, x)))


def _power(draw: random.Random) -> Kind:
    power, modulus = draw.randint(2, 4), draw.randint(5, 19)
    says = f"Return the remainder of x to the power of {power} when divided by {modulus}."
    return Kind("x", says, _number(2, 30), lambda x: x**power % modulus)


def _digits(draw: random.Random) -> Kind:
    factor = draw.randint(2, 9)
    says = f"Return the sum of the digits of n, multiplied by {factor}."
    return Kind("n", says, _number(10, 9999), lambda n: factor * sum(map(int, str(n))))


def _count_above(draw: random.Random) -> Kind:
    least = draw.randint(5, 20)
    says = f"Return how many of the numbers are greater than {least}."
    return Kind("numbers", says, _numbers(), lambda numbers: sum(x > least for x in numbers))


def _multiples(draw: random.Random) -> Kind:
    divisor = draw.randint(2, 5)
    says = f"Return the sum of the numbers that are divisible by {divisor}."
    return Kind(
        "numbers", says, _numbers(), lambda numbers: sum(x for x in numbers if x % divisor == 0)
    )


def _every(draw: random.Random) -> Kind:
    step = draw.randint(2, 3)
    says = f"Return every {'second' if step == 2 else 'third'} number, beginning with the first."
    return Kind("numbers", says, _numbers(4), lambda numbers: numbers[::step])


def _largest(draw: random.Random) -> Kind:
    place = draw.randint(2, 3)
    says = f"Return the {'second' if place == 2 else 'third'} largest of the numbers."
    return Kind("numbers", says, _numbers(4), lambda numbers: sorted(numbers)[-place])


def _rotated(draw: random.Random) -> Kind:
    places = draw.randint(1, 3)
    says = f"Return the numbers rotated to the left by {places}."
    return Kind("numbers", says, _numbers(4), lambda n: n[places:] + n[:places])


def _scaled(draw: random.Random) -> Kind:
    factor, more = draw.randint(2, 9), draw.randint(1, 9)
    says = f"Return a list with each number multiplied by {factor} and increased by {more}."
    return Kind("numbers", says, _numbers(), lambda numbers: [factor * x + more for x in numbers])


def _replaced(draw: random.Random) -> Kind:
    old, new = draw.sample("aeiourst", 2)
    says = f"Return the text with every '{old}' replaced by '{new}'."
    return Kind("text", says, _text, lambda text: text.replace(old, new))


def _letters(draw: random.Random) -> Kind:
    chosen = "".join(sorted(draw.sample("aeiourst", 3)))
    says = f"Return how many letters of the text are one of '{chosen}'."
    return Kind("text", says, _text, lambda text: sum(letter in chosen for letter in text))


def _repeated(draw: random.Random) -> Kind:
    times, mark = draw.randint(2, 4), draw.choice("-+*/")
    says = f"Return the text {times} times, joined by '{mark}'."
    return Kind("text", says, _text, lambda text: mark.join([text] * times))


def _long_words(draw: random.Random) -> Kind:
    least = draw.randint(4, 5)
    says = f"Return the words that have more than {least} letters."
    return Kind("words", says, _list_of_words, lambda words: [w for w in words if len(w) > least])


def _initials(draw: random.Random) -> Kind:
    count = draw.randint(1, 3)
    says = f"Return the first {count} letters of each word, joined together, in upper case."
    return Kind(
        "words", says, _list_of_words, lambda words: "".join(w[:count] for w in words).upper()
    )


KINDS: dict[str, Callable[[random.Random], Kind]] = {
    "linear": _linear,
    "limited": _limited,
    "power_remainder": _power,
    "digit_sum": _digits,
    "count_above": _count_above,
    "sum_of_multiples": _multiples,
    "every_other": _every,
    "nth_largest": _largest,
    "rotated": _rotated,
    "scaled": _scaled,
    "replaced": _replaced,
    "count_letters": _letters,
    "repeated": _repeated,
    "long_words": _long_words,
    "initials": _initials,
}
