"""Texts of long thoughts cut into rounds, for a model that is to reason as `infty-think` does.

A line of the source has a prompt and an `answer` of the form <think> thoughts </think> conclusion.
The thoughts are cut into segments at blank lines before a capital letter, and the model that is
given summarises: after each segment, what all segments up to it have achieved. Each round becomes a
line with `prompt` (or `messages`), `history`, which follows it, and `target`, to be learnt.

Source: Yan et al., InftyThink, arXiv:2503.06692, section 3.2; of its repository
data_preprocess/segmentation.py and generate_data.py. No segment is longer than the limit unless one
paragraph is; the released code lets each exceed it by a paragraph.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench.prompts import Prompt, read_prompts
from foretell.errors import BadConfig, ForetellError
from foretell.ops.files import write_text
from foretell.ops.parsing import parse_json
from foretell.strategies.samples.segments import (
    CLOSE,
    HISTORY,
    KNOWN,
    LIST,
    OPEN_BEHIND,
    THINK,
    THOUGHT,
)
from foretell.train import recipes

if TYPE_CHECKING:
    from foretell.api.lm import LM

Row = dict[str, Any]  # a line of the file
Tell = Callable[[str, int, int | None], None]  # (what is being done, how much of it, of how much)
ANSWER = re.compile(rf"\s*{THINK}\n?(.+?)\n?{THOUGHT}(.*)", re.S)
START = re.compile(r"\n\n+(?=[^\W\d_a-z])")


@dataclass(frozen=True)
class Cut:
    """How long texts are cut."""

    segment: int = 4096  # tokens of a segment's thoughts
    summary: int = 2048  # tokens of a summary
    tries: int = 4  # at a summary that comes to an end
    temperature: float = 0.5  # of summaries
    seed: int = 0  # of the first try; each other's is one higher

    def __post_init__(self) -> None:
        sizes = {"segment": (16, 1 << 20), "summary": (8, 1 << 20), "tries": (1, 64)}
        recipes.check_ranges(self, {**sizes, "temperature": (0, 100), "seed": (0, 1 << 31)})


def steps_of(thoughts: str) -> list[str]:
    """Paragraphs; one that does not begin with a capital letter belongs to the one before."""
    starts = [0, *(m.end() for m in START.finditer(thoughts) if thoughts[m.end()].isupper())]
    return [thoughts[a:b] for a, b in zip(starts, [*starts[1:], len(thoughts)], strict=True)]


def pack_steps(steps: Sequence[str], size: Callable[[str], int], max_tokens: int) -> list[str]:
    """Joins as many paragraphs each time as fit."""
    segments: list[str] = []
    segment_tokens = 0
    for step in steps:
        tokens = size(step)
        if segments and segment_tokens + tokens <= max_tokens:
            segments[-1] += step
            segment_tokens += tokens
        else:
            segments.append(step)
            segment_tokens = tokens
    return [segment.strip() for segment in segments]


def rounds_of(
    prompt: Prompt, segments: Sequence[str], summaries: Sequence[str], conclusion: str
) -> list[Row]:
    """The lines of one text; of each segment but the last there is a summary."""
    prompt_field = "prompt" if isinstance(prompt, str) else "messages"
    rows = []
    for place, segment in enumerate(segments):
        history = f"{HISTORY}{summaries[place - 1]}{KNOWN}" if place else ""
        target = f"{THINK}\n{segment}"
        if place < len(summaries):
            target += f"{OPEN_BEHIND}{summaries[place]}{CLOSE.rstrip()}"
        else:
            target += f"\n{THOUGHT}{conclusion}"
        rows.append({prompt_field: prompt, "history": history, "target": target})
    return rows


def write_summaries(
    lm: LM, prompt: Prompt, segments: Sequence[str], cut_options: Cut
) -> list[str] | None:
    """After each segment but the last what was achieved; None: one came to no end."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    summaries = []
    for count in range(1, len(segments)):
        thoughts_turn = {"role": "assistant", "content": "\n\n".join(segments[:count])}
        messages = [*turns, thoughts_turn, {"role": "user", "content": LIST}]
        for number in range(cut_options.tries):
            output = lm.generate(
                messages, max_new_tokens=cut_options.summary, temperature=cut_options.temperature,
                seed=cut_options.seed + number,
            )  # fmt: skip
            if output.finish_reason == "stop" and output.text.strip():
                summaries.append(output.text.strip())
                break
        else:
            return None
    return summaries


def write_rounds(lm: LM, source: Path, out: Path, cut: Cut, tell: Tell) -> dict[str, int]:
    """Writes the rounds of a file; returns how many `rows` of how many `texts`, and how many texts
    were left out: `without_thoughts`, or `unfinished` (too long, or no summary came to an end).

    Raises BadConfig.
    """
    prompts = read_prompts(source)
    lines = [parse_json(line) for line in source.read_text("utf-8").split("\n") if line.strip()]
    rows: list[Row] = []
    counts = {"texts": len(prompts), "rows": 0, "without_thoughts": 0, "unfinished": 0}
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=True), 1):
        if not isinstance(line.get("answer"), str):
            raise BadConfig(f"{source}, row {number}: `answer` must be a text with its thoughts")
        answer_match = ANSWER.fullmatch(line["answer"])
        if answer_match is None:
            counts["without_thoughts"] += 1
        else:
            steps = steps_of(answer_match[1])
            segments = pack_steps(steps, lambda text: len(lm.prompt_ids(text)), cut.segment)
            try:
                summaries = write_summaries(lm, prompt, segments, cut)
            except ForetellError:
                summaries = None
            if summaries is None:
                counts["unfinished"] += 1
            else:
                rows += rounds_of(prompt, segments, summaries, answer_match[2])
        tell("cutting", number, len(prompts))
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {**counts, "rows": len(rows)}
