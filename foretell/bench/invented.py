"""Code that uses invented modules, and which of the names after its dots exist.

Modules of two classes are made up, whose attributes have names that no model has seen, and three
prompts for each that use their objects and end after a dot or shortly before one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.constraints.completing import Documents
from foretell.constraints.members import NAME_BYTES, find_member_dots

ONSETS = "br cl d dr f fl g gl gr k l m n p pl qu r s sk sl sn sp st t tr v w z".split()
VOWELS = "a e i o u oo ea ai".split()
CODAS = "b ck d g lt m n nd p r rk sh st t x zz".split()
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


def invent_word(generator: random.Random) -> str:
    """Makes up a word that does not exist."""
    parts = []
    for syllable in range(generator.choice((1, 2))):
        has_ending = not syllable or generator.random() < 0.5
        parts.append(
            generator.choice(ONSETS)
            + generator.choice(VOWELS)
            + (generator.choice(CODAS) if has_ending else "")
        )
    return "".join(parts)


def invent_modules(count: int, seed: int) -> list[Module]:
    """Makes up `count` modules, always the same for a seed."""
    generator = random.Random(seed)
    modules = []
    for module_number in range(count):
        attribute_names: dict[str, None] = {}
        while len(attribute_names) < 8:
            attribute_names[
                "_".join(invent_word(generator) for _ in range(generator.choice((1, 2, 2))))
            ] = None
        classes = {
            "whole": invent_word(generator).title(),
            "part": f"{invent_word(generator).title()}Unit",
        }
        import_lines = (
            f"from kit.mod_{module_number} import {classes['whole']}, {classes['part']}\n\n\n"
        )
        prompts = tuple(import_lines + prompt.format(**classes) for prompt in PROMPTS)
        modules.append(Module(module_number, MODULE.format(*attribute_names, **classes), prompts))
    return modules


def write_modules(modules: Sequence[Module], root: Path) -> None:
    """Writes the modules into a folder, as the package `kit`."""
    (root / "kit").mkdir()
    (root / "kit" / "__init__.py").touch()
    for module in modules:
        (root / "kit" / f"mod_{module.number}.py").write_text(module.code, "utf-8")


def judge_names(prompt: str, text: str, judge: Documents) -> list[tuple[str, bool]]:
    """The names after dots in the whole lines of an answer, where the server has any there."""
    code, answer_start = (prompt + text).encode(), len(prompt.encode())
    code = code[: max(code.rfind(b"\n") + 1, answer_start)]
    judged_names = []
    for dot_position in find_member_dots(code)[1]:
        name_end = dot_position + 1
        while name_end < len(code) and code[name_end] in NAME_BYTES:
            name_end += 1
        member_names = (
            judge.complete_names(code[: dot_position + 1])
            if name_end > max(dot_position + 1, answer_start)
            else frozenset()
        )
        if member_names:
            name_bytes = code[dot_position + 1 : name_end]
            judged_names.append((name_bytes.decode("utf-8", "replace"), name_bytes in member_names))
    return judged_names
