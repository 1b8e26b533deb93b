"""Code that uses invented modules, and which of the names behind its dots exist.

Modules of two classes are made up, whose attributes have names that no model has seen, and three
prompts for each that use their objects and end behind a dot or shortly before one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.constraints.completing import Documents
from foretell.constraints.members import NAME_BYTES, read

FIRST = "br cl d dr f fl g gl gr k l m n p pl qu r s sk sl sn sp st t tr v w z".split()
MIDDLE = "a e i o u oo ea ai".split()
LAST = "b ck d g lt m n nd p r rk sh st t x zz".split()
MODULE = '''class {part}:
    """A part of a {whole}."""

    def __init__(self, {0}: int, {1}: str) -> None:
        self.{0} = {0}
        self.{1} = {1}

    def {2}(self) -> int:
        return self.{0} * 2


class {whole}:
    """Something that is made of parts."""

    def __init__(self, {3}: float, {4}: list[str]) -> None:
        self.{3} = {3}
        self.{4} = {4}
        self.{5} = {part}(3, "x")

    def {6}(self, amount: int) -> float:
        return self.{3} * amount

    def {7}(self) -> {part}:
        return self.{5}
'''
PROMPTS = (
    'def describe(item: {whole}) -> str:\n    """Describe it in one line."""\n    return str(item.',
    "def summary(part: {part}) -> dict:\n"
    '    """All values of a part by their names."""\n    result = {{}}\n    result["first"] = part',
    "def compare(left: {whole}, right: {whole}) -> bool:\n"
    '    """Whether both are worth the same."""\n    if left.',
)


@dataclass(frozen=True)
class Module:
    """`number`: of its file, kit/mod_NUMBER.py; `code` stands in it, `prompts` use it."""

    number: int
    code: str
    prompts: tuple[str, ...]


def word(draw: random.Random) -> str:
    """One that is none."""
    parts = []
    for number in range(draw.choice((1, 2))):
        ends = not number or draw.random() < 0.5
        parts.append(draw.choice(FIRST) + draw.choice(MIDDLE) + (draw.choice(LAST) if ends else ""))
    return "".join(parts)


def invent(count: int, seed: int) -> list[Module]:
    """So many modules, always the same for a seed."""
    draw = random.Random(seed)
    modules = []
    for number in range(count):
        names: dict[str, None] = {}
        while len(names) < 8:
            names["_".join(word(draw) for _ in range(draw.choice((1, 2, 2))))] = None
        classes = {"whole": word(draw).title(), "part": f"{word(draw).title()}Unit"}
        head = f"from kit.mod_{number} import {classes['whole']}, {classes['part']}\n\n\n"
        prompts = tuple(head + prompt.format(**classes) for prompt in PROMPTS)
        modules.append(Module(number, MODULE.format(*names, **classes), prompts))
    return modules


def put(modules: Sequence[Module], root: Path) -> None:
    """Writes the modules into a folder, as the package `kit`."""
    (root / "kit").mkdir()
    (root / "kit" / "__init__.py").touch()
    for module in modules:
        (root / "kit" / f"mod_{module.number}.py").write_text(module.code, "utf-8")


def names_in(prompt: str, text: str, judge: Documents) -> list[tuple[str, bool]]:
    """The names behind dots in the whole lines of an answer, where the server has any there."""
    whole, start = (prompt + text).encode(), len(prompt.encode())
    whole = whole[: max(whole.rfind(b"\n") + 1, start)]
    found = []
    for dot in read(whole)[1]:
        end = dot + 1
        while end < len(whole) and whole[end] in NAME_BYTES:
            end += 1
        known = judge.names(whole[: dot + 1]) if end > max(dot + 1, start) else frozenset()
        if known:
            name = whole[dot + 1 : end]
            found.append((name.decode("utf-8", "replace"), name in known))
    return found
