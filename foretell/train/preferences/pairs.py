"""Pairs of answers of which one is better: what `foretell train dpo` learns from.

A file of pairs has JSON lines of a prompt (`prompt` or `messages`), and its better answer `chosen`
beside the other, `rejected`. `foretell train pairs` makes one of prompts alone: the method `spar`
judges the model's own answer and refines it, and where a refinement passes, the two are a pair that
differ in what was amiss and in little else.

Source: Cheng et al., SPaR, arXiv:2412.11605, section 2.3; of its repository src/process_data.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.api.outputs import Output
from foretell.bench.prompts import Prompt, read_prompts
from foretell.core.stats import Stats
from foretell.errors import BadConfig, PromptTooLong
from foretell.ops.files import write_text
from foretell.ops.parsing import parse_json

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.train.preferences.preferences import Reader

Row = dict[str, Any]  # a line of the file
Tell = Callable[[str, int, int | None], None]  # (what is being done, how much of it, of how much)
AT_ONCE = 16  # prompts that are searched side by side
CURE = "; `foretell train pairs` writes such files"


@dataclass(frozen=True)
class Search:
    """How pairs are looked for."""

    method: str = "spar"  # the search: spar, with options or without
    above: float = 0.5  # the score that a refinement must exceed
    max_new_tokens: int = 512  # of an answer, and of a refinement that takes its place
    temperature: float = 0.7  # of the first answer
    seed: int = 0  # of the first prompt; each other's is one higher

    def __post_init__(self) -> None:
        if self.method.partition(":")[0] != "spar":
            raise BadConfig.field("method", self.method, "spar, with options or without")
        if not 0 <= self.above < 1:
            raise BadConfig.field("above", self.above, "from 0 to below 1")


def pair_of(output: Output, above: float) -> tuple[Output, Output] | None:
    """The best refinement and the answer that the search began with; None where no refinement has
    a score over `above`, where one of them is unfinished, or where they are equal.
    """
    best_sample = output.samples[0]
    first_sample = output.samples[int(output.stats.notes.get("first", 0))]
    if (
        best_sample.score is None
        or first_sample.score is None
        or not best_sample.score > max(above, first_sample.score)
    ):
        return None
    if best_sample.finish_reason != "stop" or first_sample.finish_reason != "stop":
        return None
    return (
        None
        if best_sample.text.strip() == first_sample.text.strip()
        else (best_sample, first_sample)
    )


def row_of(prompt: Prompt, output: Output, above: float) -> Row:
    """A line of the file; `chosen` and `rejected` are null where no pair was found."""
    prompt_field = "prompt" if isinstance(prompt, str) else "messages"
    row: Row = {prompt_field: prompt, "chosen": None, "rejected": None}
    if output.error is not None:
        return {**row, "error": str(output.error)}
    pair = pair_of(output, above)
    if pair is None:
        return row
    better, other = pair
    texts = {"chosen": better.text, "rejected": other.text}
    return {**row, **texts, "scores": [better.score, other.score]}


def write_pairs(
    lm: LM, prompts: Sequence[Prompt], path: Path, search: Search, tell: Tell
) -> list[Row]:
    """Looks for a pair of every prompt, and writes what is found every few of them; returns the
    rows. Those that the file has are kept. Raises BadConfig for a file of other prompts.
    """
    rows = rows_so_far(path, prompts)
    tell("searching", len(rows), len(prompts))
    while len(rows) < len(prompts):
        prompt_part = list(prompts[len(rows) : len(rows) + AT_ONCE])
        outputs = search_pairs(lm, prompt_part, search, search.seed + len(rows))
        pairs = zip(prompt_part, outputs, strict=True)
        rows += [row_of(prompt, output, search.above) for prompt, output in pairs]
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        tell("searching", len(rows), len(prompts))
    return rows


def search_pairs(lm: LM, prompts: list[Prompt], search: Search, seed: int) -> list[Output]:
    """An answer a prompt, with all that was found beside it; of one that is too long, the error."""
    try:
        outputs_found: list[Output] = lm.generate(
            prompts,
            search.method,
            max_new_tokens=search.max_new_tokens,
            temperature=search.temperature,
            seed=[seed + number for number in range(len(prompts))],
        )
    except PromptTooLong as error:  # is raised for all that were asked with it
        if len(prompts) == 1:
            return [Output("", [], "error", Stats(), error=error)]
        single_outputs = [
            search_pairs(lm, [prompt], search, seed + n) for n, prompt in enumerate(prompts)
        ]
        return [output for outputs in single_outputs for output in outputs]
    return outputs_found


def rows_so_far(path: Path, prompts: Sequence[Prompt]) -> list[Row]:
    """The rows that a file has already. Raises BadConfig where they are of other prompts."""
    if not path.exists():
        return []
    if read_prompts(path) != list(prompts[: len(rows := read_rows(path))]):
        raise BadConfig(f"{path}: holds pairs of other prompts; name another file")
    return rows


def read_rows(path: Path) -> list[Row]:
    return [parse_json(line) for line in path.read_text("utf-8").split("\n") if line.strip()]


def read_pairs(path: Path, reader: Reader) -> None:
    """Gives the reader the pairs of a file. Raises BadConfig."""
    prompts = read_prompts(path)
    for number, (prompt, row) in enumerate(zip(prompts, read_rows(path), strict=True), 1):
        if {"chosen", "rejected"} <= row.keys() and row["chosen"] is row["rejected"] is None:
            reader.leave_out("without a pair")
            continue
        for name in ("chosen", "rejected"):
            if not isinstance(row.get(name), str) or not row[name]:
                raise BadConfig(
                    f"{path}, row {number}: `{name}` must be a text, and not empty{CURE}"
                )
        reader.add(prompt, row["chosen"], row["rejected"])
