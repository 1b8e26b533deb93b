"""The suite `repetition`: do texts go in circles, and what do warpers and methods change in that?

Every method goes on with every prompt, alone and with each of the warpers that are named. Of each
answer these count: the share of its 4-grams of tokens, and of its lines that are not blank, that
stood in it before; the share of its tokens that are different ones; whether it ended by itself; of
code, whether prompt and answer together parse as Python, and whether both: a program that repeats
one line without end parses wherever it is cut. Where a method returns several texts, such as beams,
the share of different 4-grams among all of them counts too. Differences to the first contender are
taken prompt by prompt, with a 95 % interval.

Source: the measures of Lan et al., arXiv:2212.02175 (repetition, diversity), and Dong et al.,
arXiv:2505.10402 (repeated n-grams and lines, programs that compile, answers that end).
"""

from __future__ import annotations

import ast
import json
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench import tasks as shared
from foretell.bench.prompts import FIELDS, Prompt, read_prompts
from foretell.bench.runner import Load, Tell
from foretell.bench.sets import prompt_ids
from foretell.bench.settings import Settings
from foretell.errors import BadConfig
from foretell.ops.assets import ASSETS
from foretell.spec import warpers_of

if TYPE_CHECKING:
    from foretell.api.lm import LM

TAKES = ("prompts", "warp")
TEXTS = ASSETS / "texts"
SHIPPED = ("openings", "programs")
WARPS = ("momentum", "rpg", "repetition_penalty:1.2")  # unless methods or warpers are named
PENALTIES = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
)
PREFIX = 40  # tokens of a plain text that are gone on with, as in the first source
GRAM = 4  # tokens
TOGETHER = 8  # prompts in one batch
# A line that a program defines or imports something with.
PYTHON = re.compile(
    r"^[ \t]*(async def|def|class) +\w+ *[(:]|^import +[\w.]+[ \t]*$|^from +[\w.]+ +import\b",
    re.MULTILINE,
)
MEASURES = {  # by name in documents: head of its column
    "repeated": "repeated 4-grams",
    "lines": "repeated lines",
    "distinct": "distinct tokens",
    "ended": "ended",
    "parses": "parse",
    "whole": "ended and parse",
    "among": "distinct 4-grams among texts",
}
failures = shared.failures


@dataclass(frozen=True)
class Item:
    """A prompt of a set; of a plain text the first tokens are one."""

    set: str
    prompt: Prompt
    text: bool = False  # whether it is a whole text


def prepare(given: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Item]:
    """The prompts of these files, or those that ship. `limit`: of each set, drawn by the seed and
    kept in their order; 0: all. Raises BadConfig.
    """
    found = []
    stems: set[str] = set()
    for path in map(Path, given or [TEXTS / f"{name}.jsonl" for name in SHIPPED]):
        if path.stem in stems:
            raise BadConfig(f"--prompts {path}: there is already a set {path.stem!r}; rename it")
        stems.add(path.stem)
        own = _read(path)
        if limit:
            places = random.Random(f"{settings.seed} {path.stem}").sample(range(len(own)), len(own))
            own = [own[place] for place in sorted(places[:limit])]
        found += own
    return found


def _read(path: Path) -> list[Item]:
    prompts = read_prompts(path)
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    items = []
    for prompt, row in zip(prompts, rows, strict=True):
        text = all(row.get(field) is None for field in FIELDS if field != "text")
        items.append(Item(path.stem, prompt, text))
    return items


def begin(settings: Settings, items: Sequence[Item], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for.
    """
    contenders(settings)
    tasks = [astuple(item) for item in items]
    return shared.begin(settings, "repetition", tasks, path, ("draft", "methods", "warps"))


def contenders(settings: Settings) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name the method and the options of sampling that go with it. Raises BadConfig."""
    specs, warps = settings.specs, settings.warps
    if settings.methods == Settings().methods:
        specs, warps = ["plain"], warps or WARPS
    found: dict[str, tuple[str, dict[str, Any]]] = {spec: (spec, {}) for spec in specs}
    for warp in warps:
        options = changed(warp)
        found |= {f"{spec} {warp}": (spec, options) for spec in specs}
    return found


def changed(spec: str) -> dict[str, Any]:
    """The options of sampling that a warper or a penalty stands for. Raises BadConfig."""
    name, _, value = spec.partition(":")
    if name not in PENALTIES:
        return {"warp": warpers_of(spec)}
    try:
        return {name: int(value) if name == "no_repeat_ngram_size" else float(value)}
    except ValueError:
        raise BadConfig(f"--warp {spec}: write a number, as in {name}:1") from None


def run(
    settings: Settings,
    items: Sequence[Item],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it."""
    programs = {
        name
        for name in {item.set for item in items}
        if 2 * sum(is_code(item) for item in items if item.set == name)
        > sum(item.set == name for item in items)
    }
    ways = contenders(settings)

    def work(lm: LM, numbers: Sequence[int]) -> list[shared.Answer]:
        own = [items[number] for number in numbers]
        prompts = [asked(lm, item) for item in own]
        answers: list[shared.Answer] = [{"set": item.set, "texts": {}} for item in own]
        for name, (method, options) in ways.items():
            outs = lm.generate(
                prompts,
                method,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperatures[0],
                seed=[settings.seed + number for number in numbers],
                **options,
            )
            for item, answer, prompt, out in zip(own, answers, prompts, outs, strict=True):
                if out.error is not None:
                    raise out.error
                head = lm.decode(prompt) if item.set in programs else None
                answer["texts"][name] = measured(out, head)
        return answers

    args = document, work, summary, tell, save, TOGETHER
    return shared.answered(settings, len(items), load, *args)


def is_code(item: Item) -> bool:
    """Whether a prompt is the beginning of a program; most of a set of code are."""
    return isinstance(item.prompt, str) and PYTHON.search(item.prompt) is not None


def asked(lm: LM, item: Item) -> list[int]:
    """Token ids, of a text the first ones."""
    ids = prompt_ids(lm, item.prompt)
    return ids[:PREFIX] if item.text else ids


def measured(out: Any, head: str | None) -> dict[str, Any]:
    """The measures of an output. `head`: the program's beginning, None where it is none."""
    found: dict[str, Any] = {
        "text": out.text,
        "tokens": len(out.tokens),
        "repeated": repeated(grams(out.tokens)),
        "lines": repeated([line for line in out.text.split("\n") if line.strip()]),
        "distinct": 1 - repeated(out.tokens),
        "ended": float(out.finish_reason == "stop"),
    }
    if head is not None:
        found["parses"] = float(parses(head + out.text))
        found["whole"] = found["ended"] * found["parses"]
    if len(out.samples) > 1:
        all_of_them = [gram for one in out.samples for gram in grams(one.tokens)]
        found["among"] = 1 - repeated(all_of_them)
    return found


def grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Every GRAM tokens in a row."""
    return [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]


def repeated(things: Sequence[Any]) -> float:
    """The share of these that stood there before; 0 where there are none."""
    return 1 - len(set(things)) / len(things) if things else 0.0


def parses(program: str) -> bool:
    """Whether a text has the syntax of Python. It is read only, never compiled or run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a program's own escapes
            ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def summary(answers: Sequence[shared.Answer]) -> dict[str, Any]:
    """Of each set and contender the mean of each measure, and how much more it is than of the
    first, with intervals.
    """
    sets: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(one["set"] for one in answers):
        texts = [one["texts"] for one in answers if one["set"] == name]
        first = next(iter(texts[0]))
        sets[name] = {"prompts": len(texts)}
        for way in texts[0]:
            figures: dict[str, Any] = {}
            for measure in MEASURES:
                if any(measure not in one[way] for one in texts):
                    continue
                values = [one[way][measure] for one in texts]
                figures[measure] = {"mean": sum(values) / len(values)}
                if way != first and all(measure in one[first] for one in texts):
                    others = [one[first][measure] for one in texts]
                    figures[measure]["more"] = shared.more(values, others)
            sets[name].setdefault("ways", {})[way] = figures
    return {"sets": sets}


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first: of each model and set the measures, and the differences."""
    found = []
    for cell in document["cells"]:
        for name, one in cell["sets"].items():
            ways = one["ways"]
            shown = [key for key in MEASURES if any(key in way for way in ways.values())]
            means = [["", *(MEASURES[key] for key in shown)]]
            gaps = [["", "", f"more than {next(iter(ways))}"]]
            for way, figures in ways.items():
                cells = [f"{figures[key]['mean']:.1%}" if key in figures else "" for key in shown]
                means.append([way, *cells])
                for key in shown:
                    if "more" in figures.get(key, {}):
                        gaps.append([way, MEASURES[key], shared.told(figures[key]["more"])])
            title = f"{name}, {cell['model']}, {cell['dtype']}: {one['prompts']} prompts"
            found.append((title, means))
            if len(gaps) > 1:
                found.append((f"{title}, differences", gaps))
    return found
