"""The suite `repetition`: do texts go in circles, and what do processors and methods change?

Every method goes on with every prompt, alone and with each of the processors named. Of each answer
these count: the share of its 4-grams of tokens, and of its lines that are not blank, that stood in
it before; the share of its tokens that are different ones; whether it ended by itself; of code,
whether prompt and answer together parse as Python, and whether both: a program that repeats one
line without end parses wherever it is cut. Where a method returns several texts, such as beams, the
share of different 4-grams among all of them counts too. Differences to the first contender are
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
from foretell.spec import build_processors

if TYPE_CHECKING:
    from foretell.api.lm import LM

TAKES = ("prompts", "processor")
TEXTS = ASSETS / "texts"
SHIPPED = ("openings", "programs")
PROCESSORS = ("momentum", "rpg", "repetition_penalty:1.2")  # unless methods or processors are named
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
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
failures = shared.failure_lines


@dataclass(frozen=True)
class Item:
    """A prompt of a set; of a plain text the first tokens are one."""

    set: str
    prompt: Prompt
    text: bool = False  # whether it is a whole text


def prepare(paths: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Item]:
    """The prompts of these files, or those that ship. `limit`: of each set, drawn by the seed and
    kept in their order; 0: all. Raises BadConfig.
    """
    chosen_items = []
    set_names: set[str] = set()
    for path in map(Path, paths or [TEXTS / f"{name}.jsonl" for name in SHIPPED]):
        if path.stem in set_names:
            raise BadConfig(f"--prompts {path}: there is already a set {path.stem!r}; rename it")
        set_names.add(path.stem)
        set_items = _read_items(path)
        if limit:
            shuffled_indices = random.Random(f"{settings.seed} {path.stem}").sample(
                range(len(set_items)), len(set_items)
            )
            set_items = [set_items[item_index] for item_index in sorted(shuffled_indices[:limit])]
        chosen_items += set_items
    return chosen_items


def _read_items(path: Path) -> list[Item]:
    prompts = read_prompts(path)
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    items = []
    for prompt, row in zip(prompts, rows, strict=True):
        is_plain_text = all(row.get(field) is None for field in FIELDS if field != "text")
        items.append(Item(path.stem, prompt, is_plain_text))
    return items


def begin(settings: Settings, items: Sequence[Item], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for.
    """
    combine_processors(settings)
    tasks = [astuple(item) for item in items]
    return shared.begin_suite(
        settings, "repetition", tasks, path, ("draft", "methods", "processors")
    )


def combine_processors(settings: Settings) -> dict[str, tuple[str, dict[str, Any]]]:
    """Methods with their options of sampling, by the name of the combination. Raises BadConfig."""
    specs, processors = settings.specs, settings.processors
    if settings.methods == Settings().methods:
        specs, processors = ["plain"], processors or PROCESSORS
    options_by_name: dict[str, tuple[str, dict[str, Any]]] = {spec: (spec, {}) for spec in specs}
    for processor in processors:
        options = sampling_options(processor)
        options_by_name |= {f"{spec} {processor}": (spec, options) for spec in specs}
    return options_by_name


def sampling_options(spec: str) -> dict[str, Any]:
    """The options of sampling that a processor or a penalty stands for. Raises BadConfig."""
    option_name, _, value = spec.partition(":")
    if option_name not in PENALTIES:
        return {"processor": build_processors(spec)}
    try:
        return {option_name: int(value) if option_name == "no_repeat_ngram_size" else float(value)}
    except ValueError:
        raise BadConfig(f"--processor {spec}: write a number, as in {option_name}:1") from None


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
    ways = combine_processors(settings)

    def work(lm: LM, numbers: Sequence[int]) -> list[shared.Answer]:
        task_items = [items[number] for number in numbers]
        prompts = [encode_prompt(lm, item) for item in task_items]
        answers: list[shared.Answer] = [{"set": item.set, "texts": {}} for item in task_items]
        for name, (method, options) in ways.items():
            outputs = lm.generate(
                prompts,
                method,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperatures[0],
                seed=[settings.seed + number for number in numbers],
                **options,
            )
            for item, answer, prompt, output in zip(
                task_items, answers, prompts, outputs, strict=True
            ):
                if output.error is not None:
                    raise output.error
                program_start = lm.decode(prompt) if item.set in programs else None
                answer["texts"][name] = measure_output(output, program_start)
        return answers

    args = document, work, summarise_sets, tell, save, TOGETHER
    return shared.answer_all(settings, len(items), load, *args)


def is_code(item: Item) -> bool:
    """Whether a prompt is the beginning of a program; most of a set of code are."""
    return isinstance(item.prompt, str) and PYTHON.search(item.prompt) is not None


def encode_prompt(lm: LM, item: Item) -> list[int]:
    """Token ids of an item's prompt, of a plain text the first ones."""
    token_ids = prompt_ids(lm, item.prompt)
    return token_ids[:PREFIX] if item.text else token_ids


def measure_output(output: Any, program_start: str | None) -> dict[str, Any]:
    """Measures an output. `program_start`: the program's beginning, None where it is none."""
    measures: dict[str, Any] = {
        "text": output.text,
        "tokens": len(output.tokens),
        "repeated": repeated_share(token_grams(output.tokens)),
        "lines": repeated_share([line for line in output.text.split("\n") if line.strip()]),
        "distinct": 1 - repeated_share(output.tokens),
        "ended": float(output.finish_reason == "stop"),
    }
    if program_start is not None:
        measures["parses"] = float(is_python(program_start + output.text))
        measures["whole"] = measures["ended"] * measures["parses"]
    if len(output.samples) > 1:
        sample_grams = [gram for sample in output.samples for gram in token_grams(sample.tokens)]
        measures["among"] = 1 - repeated_share(sample_grams)
    return measures


def token_grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns every GRAM tokens in a row."""
    return [tuple(tokens[start : start + GRAM]) for start in range(len(tokens) - GRAM + 1)]


def repeated_share(sequence: Sequence[Any]) -> float:
    """Share of a sequence's entries that stood in it before; 0 for an empty one."""
    return 1 - len(set(sequence)) / len(sequence) if sequence else 0.0


def is_python(program: str) -> bool:
    """Whether a text has the syntax of Python. It is read only, never compiled or run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a program's own escapes
            ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def summarise_sets(answers: Sequence[shared.Answer]) -> dict[str, Any]:
    """Summarises each set and contender: the mean of each measure, and how much more it is than the
    first contender's, with intervals.
    """
    sets: dict[str, dict[str, Any]] = {}
    for set_name in dict.fromkeys(answer["set"] for answer in answers):
        texts_by_way = [answer["texts"] for answer in answers if answer["set"] == set_name]
        first_way = next(iter(texts_by_way[0]))
        sets[set_name] = {"prompts": len(texts_by_way)}
        for way in texts_by_way[0]:
            way_figures: dict[str, Any] = {}
            for measure in MEASURES:
                if any(measure not in answer[way] for answer in texts_by_way):
                    continue
                values = [answer[way][measure] for answer in texts_by_way]
                way_figures[measure] = {"mean": sum(values) / len(values)}
                if way != first_way and all(
                    measure in answer[first_way] for answer in texts_by_way
                ):
                    first_values = [answer[first_way][measure] for answer in texts_by_way]
                    way_figures[measure]["more"] = shared.compare_scores(values, first_values)
            sets[set_name].setdefault("ways", {})[way] = way_figures
    return {"sets": sets}


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first: of each model and set the measures, and the differences."""
    titled_tables = []
    for cell in document["cells"]:
        for set_name, set_figures in cell["sets"].items():
            ways = set_figures["ways"]
            shown_measures = [
                measure for measure in MEASURES if any(measure in way for way in ways.values())
            ]
            mean_rows = [["", *(MEASURES[measure] for measure in shown_measures)]]
            difference_rows = [["", "", f"more than {next(iter(ways))}"]]
            for way, figures in ways.items():
                mean_texts = [
                    f"{figures[measure]['mean']:.1%}" if measure in figures else ""
                    for measure in shown_measures
                ]
                mean_rows.append([way, *mean_texts])
                for measure in shown_measures:
                    if "more" in figures.get(measure, {}):
                        difference_rows.append(
                            [
                                way,
                                MEASURES[measure],
                                shared.format_difference(figures[measure]["more"]),
                            ]
                        )
            title = (
                f"{set_name}, {cell['model']}, {cell['dtype']}: {set_figures['prompts']} prompts"
            )
            titled_tables.append((title, mean_rows))
            if len(difference_rows) > 1:
                titled_tables.append((f"{title}, differences", difference_rows))
    return titled_tables
