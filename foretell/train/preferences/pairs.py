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
from foretell.ops.parsing import json_of

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
    best = output.samples[0]
    first = output.samples[int(output.stats.notes.get("first", 0))]
    if best.score is None or first.score is None or not best.score > max(above, first.score):
        return None
    if best.finish_reason != "stop" or first.finish_reason != "stop":
        return None
    return None if best.text.strip() == first.text.strip() else (best, first)


def row_of(prompt: Prompt, output: Output, above: float) -> Row:
    """A line of the file; `chosen` and `rejected` are null where no pair was found."""
    field = "prompt" if isinstance(prompt, str) else "messages"
    row: Row = {field: prompt, "chosen": None, "rejected": None}
    if output.error is not None:
        return {**row, "error": str(output.error)}
    found = pair_of(output, above)
    if found is None:
        return row
    best, first = found
    texts = {"chosen": best.text, "rejected": first.text}
    return {**row, **texts, "scores": [best.score, first.score]}


def write_pairs(
    lm: LM, prompts: Sequence[Prompt], path: Path, search: Search, tell: Tell
) -> list[Row]:
    """Looks for a pair of every prompt, and writes what is found every few of them; returns the
    rows. Those that the file has are kept. Raises BadConfig for a file of other prompts.
    """
    rows = known(path, prompts)
    tell("searching", len(rows), len(prompts))
    while len(rows) < len(prompts):
        part = list(prompts[len(rows) : len(rows) + AT_ONCE])
        outputs = searched(lm, part, search, search.seed + len(rows))
        found = zip(part, outputs, strict=True)
        rows += [row_of(prompt, output, search.above) for prompt, output in found]
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        tell("searching", len(rows), len(prompts))
    return rows


def searched(lm: LM, prompts: list[Prompt], search: Search, seed: int) -> list[Output]:
    """An answer a prompt, with all that was found beside it; of one that is too long, the error."""
    try:
        found: list[Output] = lm.generate(
            prompts,
            search.method,
            max_new_tokens=search.max_new_tokens,
            temperature=search.temperature,
            seed=[seed + number for number in range(len(prompts))],
        )
    except PromptTooLong as error:  # is raised for all that were asked with it
        if len(prompts) == 1:
            return [Output("", [], "error", Stats(), error=error)]
        alone = [searched(lm, [one], search, seed + n) for n, one in enumerate(prompts)]
        return [output for outputs in alone for output in outputs]
    return found


def known(path: Path, prompts: Sequence[Prompt]) -> list[Row]:
    """The rows that a file has already. Raises BadConfig where they are of other prompts."""
    if not path.exists():
        return []
    if read_prompts(path) != list(prompts[: len(rows := read_rows(path))]):
        raise BadConfig(f"{path}: holds pairs of other prompts; name another file")
    return rows


def read_rows(path: Path) -> list[Row]:
    return [json_of(line) for line in path.read_text("utf-8").split("\n") if line.strip()]


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
