"""The share of given tests that a program passes.

The text is a program, or has one in a fenced block, or is what follows a prompt that begins one.
It is run in a sandbox, a fresh interpreter that reaches neither files nor the network and starts no
process, with limits on its time, memory and output. The tests' calls are made one by one there, and
what they give is compared outside, so that no program can say of itself that it has passed. One
that does not run passes nothing.

Tests are read from a file of JSON lines, each with `tests`, and `prompt` and `name` where the file
has several: {"prompt": "...", "tests": ["assert add(1, 2) == 3", ...]}. A test may also be an
object, {"call": "add", "args": [1, 2], "expected": 3}. Without a name those count whose prompt
stands in the request's.

Paper: Zhang et al., Planning with Large Language Models for Code Generation, arXiv:2303.05510
Guarantee: lossy: a text that is chosen by it has another distribution than a sample
Cost: none
Needs: Linux 5.13 or newer, or user namespaces, on x86_64 or aarch64; a file of tests
Trains: nothing
Try: --method best-of --reward tests:path=FILE.jsonl
Differs:
- a test is a call of a function, where the paper's programs read standard input and print
- the time limit is that of a whole program with all its tests, not of each
- a program that does not run has 0, as in the paper; the released code also tells it from others
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from foretell.core.settings import Range
from foretell.errors import BadConfig
from foretell.rewards.base import Reward
from foretell.rewards.cases import Cases, judge_program, read_cases
from foretell.rewards.sandbox import MEGABYTE, Limits, find_walls

FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
SIDE_BY_SIDE = 4  # programs that run at once


@dataclass(frozen=True)
class Tests(Reward):
    """A file of tests, and the limits of a program."""

    path: str = ""  # the file of tests
    name: str = ""  # of the line whose tests count; without one, that with the request's prompt
    # that a program may take with all its tests
    seconds: Annotated[float, Range(0, 3600, open_low=True)] = 10.0
    memory: Annotated[int, Range(64, 1 << 20)] = 512  # megabytes that it may take

    __test__ = False  # it is no class of tests, whatever pytest makes of its name
    partial = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise BadConfig("tests: needs a file of tests; name one, as in tests:path=tests.jsonl")
        rows = read_cases(self.path)
        if self.name and self.name not in {row.name for row in rows}:
            raise BadConfig(f"tests:name={self.name!r}: {self.path} has no line of that name")
        find_walls()  # so that a machine without them is known before anything is computed

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        """Raises BadConfig where no line of the file is about the prompt."""
        cases = self.find_cases(prompt)
        limits = Limits(self.seconds, int(self.seconds) + 1, self.memory * MEGABYTE)
        program_texts = [program_of(text, cases.prompt or prompt, cases) for text in texts]

        def share(program: str) -> float:
            found = judge_program(program, cases.tests, limits)
            return sum(found) / len(found)

        if len(program_texts) < 2:
            return [share(program) for program in program_texts]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            return list(pool.map(share, program_texts))

    def find_cases(self, prompt: str) -> Cases:
        """Finds the tests of the name, or of the longest prompt that stands in this one."""
        case_rows = read_cases(self.path)
        if self.name:
            return next(row for row in case_rows if row.name == self.name)
        matching_rows = [row for row in case_rows if row.prompt and row.prompt.strip() in prompt]
        if matching_rows:
            return max(matching_rows, key=lambda row: len(row.prompt))
        if len(case_rows) == 1 and not case_rows[0].prompt:
            return case_rows[0]
        raise BadConfig(
            f"tests: no line of {Path(self.path).name} has a prompt that stands in the request's; "
            "add one, or choose a line by name="
        )


def program_of(text: str, prompt: str, cases: Cases) -> str:
    """Extracts the code of an answer to a prompt.

    That is a fenced block that has the function which the tests call first, or the whole text if
    that has it, else what the prompt begins and the text goes on with.
    """
    function_name = cases.tests[0].call.name.partition(".")[0]
    definition_pattern = re.compile(
        rf"^(?:(?:async )?def|class) {function_name}\b|^{function_name}\b[^\n=]*=[^=]", re.MULTILINE
    )
    for code in (*FENCED.findall(text), text):
        if definition_pattern.search(code):
            return str(code)
    return prompt + text
