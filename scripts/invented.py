"""Names behind dots in code that uses invented modules: `python scripts/invented.py`.

    python scripts/invented.py --model smollm2 --dtype int8 --method plain

Modules of two classes are made up, whose attributes have names that no model has seen, and three
prompts for each that use their objects and end behind a dot or shortly before one. A model goes on
with and without the constraint `monitor`. Of each answer the whole lines count: which names behind
dots exist, by the language server's word where it has one, and whether a program has no other name.
Differences have a 95 % interval, by resampling modules. No speed is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import foretell
from foretell.constraints.monitor import Monitor
from foretell.ops.completing import Documents
from foretell.ops.members import NAME_BYTES, read

RESAMPLED = 2_000
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
class Answer:
    """`names`: those behind dots, each with whether it exists."""

    module: int
    names: list[tuple[str, bool]]

    @property
    def clean(self) -> bool:
        return all(exists for _, exists in self.names)


def word(draw: random.Random) -> str:
    parts = []
    for number in range(draw.choice((1, 2))):
        ends = not number or draw.random() < 0.5
        parts.append(draw.choice(FIRST) + draw.choice(MIDDLE) + (draw.choice(LAST) if ends else ""))
    return "".join(parts)


def invent(root: Path, count: int, seed: int) -> list[tuple[int, str]]:
    """Writes the modules; returns (module, prompt) of each prompt."""
    draw = random.Random(seed)
    (root / "kit").mkdir()
    (root / "kit" / "__init__.py").touch()
    prompts = []
    for number in range(count):
        names: dict[str, None] = {}
        while len(names) < 8:
            names["_".join(word(draw) for _ in range(draw.choice((1, 2, 2))))] = None
        classes = {"whole": word(draw).title(), "part": f"{word(draw).title()}Unit"}
        (root / "kit" / f"mod_{number}.py").write_text(MODULE.format(*names, **classes), "utf-8")
        head = f"from kit.mod_{number} import {classes['whole']}, {classes['part']}\n\n\n"
        prompts += [(number, head + prompt.format(**classes)) for prompt in PROMPTS]
    return prompts


def names_in(prompt: str, text: str, judge: Documents) -> list[tuple[str, bool]]:
    """The names behind dots in the whole lines of an answer, where the server has any there."""
    whole, start = (prompt + text).encode(), len(prompt.encode())
    whole = whole[: max(whole.rfind(b"\n"), start)]
    found = []
    for dot in read(whole)[1]:
        end = dot + 1
        while end < len(whole) and whole[end] in NAME_BYTES:
            end += 1
        known = judge.names(whole[: dot + 1]) if start < end < len(whole) else frozenset()
        if known:
            name = whole[dot + 1 : end]
            found.append((name.decode("utf-8", "replace"), name in known))
    return found


def interval(differences: list[float]) -> tuple[float, float, float]:
    """The mean, and its 95 % interval."""
    values = np.array(differences)
    rows = np.random.default_rng(0).integers(len(values), size=(RESAMPLED, len(values)))
    low, high = np.quantile(values[rows].mean(1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--method", default="plain")
    parser.add_argument("--modules", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", default="", help="as of monitor")
    asked = parser.parse_args()
    lm = foretell.load(asked.model, dtype=asked.dtype)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prompts = invent(root, asked.modules, asked.seed)
        monitor = Monitor(root=folder, file="kit/use.py", server=asked.server)
        patient = replace(monitor, limit=60.0)
        judge = Documents(patient.language_server({}), root / "kit" / "use.py")
        sides: dict[str, list[Answer]] = {"without": [], "with": []}
        outside: dict[str, int] = {}
        for number, prompt in prompts:
            for side, answers in sides.items():
                out = lm.generate(
                    prompt,
                    asked.method,
                    max_new_tokens=asked.max_new_tokens,
                    constraint=monitor if side == "with" else None,
                )
                answers.append(Answer(number, names_in(prompt, out.text, judge)))
                for what, count in out.stats.outside.items():
                    outside[what] = outside.get(what, 0) + count
        judge.server.close()
    report: dict[str, object] = {"questions": outside, "model": asked.model, "dtype": asked.dtype}
    for side, answers in sides.items():
        names = [exists for answer in answers for _, exists in answer.names]
        clean = sum(answer.clean for answer in answers)
        print(f"{side}: {sum(names)} of {len(names)} names exist, {clean} of {len(answers)} clean")
        report[side] = {"names": len(names), "exist": sum(names), "clean": clean}
    gains = []
    for number in range(asked.modules):
        clean_of = [
            np.mean([answer.clean for answer in answers if answer.module == number])
            for answers in (sides["with"], sides["without"])
        ]
        gains.append(float(clean_of[0] - clean_of[1]))
    mean, low, high = interval(gains)
    print(f"clean programs: {mean:+.1%} ({low:+.1%} to {high:+.1%})")
    report["gain"] = [mean, low, high]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
