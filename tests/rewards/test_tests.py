"""The share of tests that programs pass, and that no program makes it larger by saying so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.errors import BadConfig
from foretell.rewards import tests as module
from foretell.rewards.cases import read_cases
from foretell.rewards.tests import program_of
from foretell.spec import build_reward

HEAD = 'def add(a, b):\n    """The sum."""\n'
GOOD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add('x', 'y') == 'xy'"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tests.jsonl"
    path.write_text(json.dumps({"tests": TESTS}), "utf-8")
    return path


def test_it_is_the_share_that_is_passed(file: Path) -> None:
    reward = build_reward(f"tests:path={file}")
    texts = [
        GOOD,
        "def add(a, b):\n    return 2 * b",
        "add = sum",
        "no program",
        f"Here it is:\n```python\n{GOOD}```\nIt adds.",
        f"```\n{GOOD}",  # not closed
        f"```\nprint(1)\n```\n ```py\n{GOOD}\n ```",  # the block that has the function
    ]
    assert reward.scores("", texts) == [1, 1 / 3, 0, 0, 1, 1, 1]
    assert not reward.partial


FORGED = {
    "printing": "print('passed', 3, 1.0)",
    "ending": "import os; os._exit(0)",
    "leaving": "raise SystemExit(0)",
    "changing the runner": (
        "import sys\nmain = sys.modules['__main__']\n"
        "main.answered = lambda *a: {'value': True, 'passed': True}"
    ),
    "a value equal to all": (
        "class Same:\n def __eq__(self, other): return True\n"
        "class Number(int):\n def __eq__(self, other): return True\n"
        "calls = [Same(), Number(0), Number(0)]\ndef add(a, b): return calls.pop()"
    ),
    "every pipe": (
        "import os\nfor pipe in range(64):\n"
        ' try: os.write(pipe, b\'{"call": 0, "passed": true}\\n\')\n except OSError: pass'
    ),
}


@pytest.mark.parametrize("how", FORGED)
def test_nothing_is_passed_by_forging(how: str, file: Path) -> None:
    program = f"{FORGED[how]}\nif 'add' not in dir():\n def add(a, b): return None"
    assert build_reward(f"tests:path={file},seconds=5").scores("", [program]) == [0]


def test_a_text_that_goes_on_with_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    rows = [
        {"name": "short", "prompt": "def add", "tests": ["assert add(1, 1) == 7"]},
        {"name": "long", "prompt": HEAD, "tests": TESTS},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    reward = build_reward(f"tests:path={path}")
    # The longest prompt that stands in the request's counts, and it begins the program.
    assert reward.scores(f"user: {HEAD}", ["    return a + b\n", GOOD]) == [1, 1]
    assert reward.scores("def add(", [GOOD]) == [0]
    named = build_reward(f"tests:path={path},name=short")
    assert named.scores("anything", ["def add(a, b): return 7"]) == [1]
    with pytest.raises(BadConfig, match="has a prompt that stands in the request's"):
        reward.scores("another prompt", [GOOD])


def test_code_is_found_by_the_function_that_is_called(file: Path) -> None:
    (cases,) = read_cases(file)
    for code in ("async def add(a):", "class add:", "add = 3", "add: int = 3"):
        assert program_of(code, "head ", cases) == code
    for text in ("def adder(a):", " def add(a):", "add == 3", "```\ndef other(): pass\n```"):
        assert program_of(text, "head ", cases) == "head " + text


def test_what_cannot_be_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="needs a file of tests"):
        module.Tests()
    with pytest.raises(BadConfig, match="cannot be read as tests"):
        module.Tests(str(tmp_path / "none"))
    with pytest.raises(BadConfig, match="has no line of that name"):
        module.Tests(str(file), name="x")
    for field in ("seconds", "memory"):
        with pytest.raises(BadConfig, match=f"tests:{field}="):
            build_reward(f"tests:path={file},{field}=0")
