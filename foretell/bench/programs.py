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
        example_lines = "\n".join(f"{call} == {value}" for call, value in self.examples)
        function_call = f"`{self.kind}({self.arguments})`"
        return f"Write a Python function {function_call}. {self.says}\n\nExamples:\n{example_lines}"

    @property
    def head(self) -> str:
        """Prompt for a model that continues texts: the question as the first lines of a program."""
        example_lines = "\n".join(f"    >>> {call}\n    {value}" for call, value in self.examples)
        return f'{self.begins}\n    """{self.says}\n\n{example_lines}\n    """'

    @property
    def examples(self) -> list[tuple[str, str]]:
        """Call and value of each public test."""
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


def make_programs(count: int, seed: int) -> list[Program]:
    """Makes different tasks, of all kinds in turn. Raises BadConfig where there are fewer."""
    generator = random.Random(seed)
    programs_by_key: dict[str, Program] = {}
    kind_names = list(KINDS)
    for attempt in range(20 * count + 100):
        if len(programs_by_key) == count:
            return list(programs_by_key.values())
        kind_name = kind_names[attempt % len(kind_names)]
        kind = KINDS[kind_name](generator)
        if (key := f"{kind_name}: {kind.says}") not in programs_by_key:
            programs_by_key[key] = _make_program(kind_name, kind, generator)
    raise BadConfig(f"{count} different tasks cannot be made; take fewer")


def _make_program(name: str, kind: Kind, generator: random.Random) -> Program:
    calls_by_text: dict[str, tuple[Any, ...]] = {}
    while len(calls_by_text) < PUBLIC + HIDDEN:
        arguments = kind.draw(generator)
        calls_by_text.setdefault(repr(arguments), arguments)
    tests = [
        Case(FunctionCall(name, arguments), kind.reference(*arguments))
        for arguments in calls_by_text.values()
    ]
    public, hidden = tuple(tests[:PUBLIC]), tuple(tests[PUBLIC:])
    return Program(name, kind.arguments, kind.says, public, hidden)


# --- what arguments are drawn from


def _integer_drawer(min_value: int, max_value: int) -> Callable[[random.Random], tuple[Any, ...]]:
    return lambda generator: (generator.randint(min_value, max_value),)


def _list_drawer(min_count: int = 3) -> Callable[[random.Random], tuple[Any, ...]]:
    return lambda generator: (
        [generator.randint(0, 30) for _ in range(generator.randint(min_count, min_count + 4))],
    )


def _draw_words(generator: random.Random) -> Sequence[str]:
    return generator.sample(WORDS, generator.randint(2, 4))


def _draw_text(generator: random.Random) -> tuple[Any, ...]:
    return (" ".join(_draw_words(generator)),)


def _draw_word_list(generator: random.Random) -> tuple[Any, ...]:
    return (list(_draw_words(generator)),)


# --- the kinds


def _linear_kind(generator: random.Random) -> Kind:
    factor, subtrahend = generator.randint(2, 9), generator.randint(1, 9)
    says = f"Return {factor} times x minus {subtrahend}."
    return Kind("x", says, _integer_drawer(-20, 20), lambda x: factor * x - subtrahend)


def _limit_kind(generator: random.Random) -> Kind:
    lower_limit, upper_limit = generator.randint(0, 9), generator.randint(15, 30)
    says = f"Return x, but at least {lower_limit} and at most {upper_limit}."
    return Kind("x", says, _integer_drawer(-5, 40), lambda x: max(lower_limit, min(upper_limit, x)))


def _power_kind(generator: random.Random) -> Kind:
    exponent, modulus = generator.randint(2, 4), generator.randint(5, 19)
    says = f"Return the remainder of x to the power of {exponent} when divided by {modulus}."
    return Kind("x", says, _integer_drawer(2, 30), lambda x: x**exponent % modulus)


def _digit_kind(generator: random.Random) -> Kind:
    factor = generator.randint(2, 9)
    says = f"Return the sum of the digits of n, multiplied by {factor}."
    return Kind("n", says, _integer_drawer(10, 9999), lambda n: factor * sum(map(int, str(n))))


def _count_above(generator: random.Random) -> Kind:
    threshold = generator.randint(5, 20)
    says = f"Return how many of the numbers are greater than {threshold}."
    return Kind(
        "numbers",
        says,
        _list_drawer(),
        lambda numbers: sum(number > threshold for number in numbers),
    )


def _multiple_kind(generator: random.Random) -> Kind:
    divisor = generator.randint(2, 5)
    says = f"Return the sum of the numbers that are divisible by {divisor}."
    return Kind(
        "numbers",
        says,
        _list_drawer(),
        lambda numbers: sum(number for number in numbers if number % divisor == 0),
    )


def _stride_kind(generator: random.Random) -> Kind:
    stride = generator.randint(2, 3)
    says = f"Return every {'second' if stride == 2 else 'third'} number, beginning with the first."
    return Kind("numbers", says, _list_drawer(4), lambda numbers: numbers[::stride])


def _rank_kind(generator: random.Random) -> Kind:
    rank = generator.randint(2, 3)
    says = f"Return the {'second' if rank == 2 else 'third'} largest of the numbers."
    return Kind("numbers", says, _list_drawer(4), lambda numbers: sorted(numbers)[-rank])


def _rotation_kind(generator: random.Random) -> Kind:
    shift = generator.randint(1, 3)
    says = f"Return the numbers rotated to the left by {shift}."
    return Kind("numbers", says, _list_drawer(4), lambda numbers: numbers[shift:] + numbers[:shift])


def _scale_kind(generator: random.Random) -> Kind:
    factor, increment = generator.randint(2, 9), generator.randint(1, 9)
    says = f"Return a list with each number multiplied by {factor} and increased by {increment}."
    return Kind(
        "numbers",
        says,
        _list_drawer(),
        lambda numbers: [factor * number + increment for number in numbers],
    )


def _replacement_kind(generator: random.Random) -> Kind:
    old_letter, new_letter = generator.sample("aeiourst", 2)
    says = f"Return the text with every '{old_letter}' replaced by '{new_letter}'."
    return Kind("text", says, _draw_text, lambda text: text.replace(old_letter, new_letter))


def _letter_kind(generator: random.Random) -> Kind:
    counted_letters = "".join(sorted(generator.sample("aeiourst", 3)))
    says = f"Return how many letters of the text are one of '{counted_letters}'."
    return Kind(
        "text", says, _draw_text, lambda text: sum(letter in counted_letters for letter in text)
    )


def _repetition_kind(generator: random.Random) -> Kind:
    repeat_count, separator = generator.randint(2, 4), generator.choice("-+*/")
    says = f"Return the text {repeat_count} times, joined by '{separator}'."
    return Kind("text", says, _draw_text, lambda text: separator.join([text] * repeat_count))


def _long_words(generator: random.Random) -> Kind:
    letter_limit = generator.randint(4, 5)
    says = f"Return the words that have more than {letter_limit} letters."
    return Kind(
        "words",
        says,
        _draw_word_list,
        lambda words: [word for word in words if len(word) > letter_limit],
    )


def _initial_kind(generator: random.Random) -> Kind:
    letter_count = generator.randint(1, 3)
    says = f"Return the first {letter_count} letters of each word, joined together, in upper case."
    return Kind(
        "words",
        says,
        _draw_word_list,
        lambda words: "".join(word[:letter_count] for word in words).upper(),
    )


KINDS: dict[str, Callable[[random.Random], Kind]] = {
    "linear": _linear_kind,
    "limited": _limit_kind,
    "power_remainder": _power_kind,
    "digit_sum": _digit_kind,
    "count_above": _count_above,
    "sum_of_multiples": _multiple_kind,
    "every_other": _stride_kind,
    "nth_largest": _rank_kind,
    "rotated": _rotation_kind,
    "scaled": _scale_kind,
    "replaced": _replacement_kind,
    "count_letters": _letter_kind,
    "repeated": _repetition_kind,
    "long_words": _long_words,
    "initials": _initial_kind,
}
