"""The numbers of a request, defined once for every report, plot and bench."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foretell.core.types import Commit


def logprobs(
    rows: torch.Tensor, tokens: list[int], k: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Of rows (n, V) and the first n tokens: each token's log-probability and the k best (token,
    log-probability).
    """
    out = []
    for row, token in zip(rows.log_softmax(-1), tokens, strict=False):
        top = row.topk(min(k, len(row)))
        out.append(
            (float(row[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        )
    return out


def logprobs_of(commit: Commit, kept: int, k: int) -> list[Any]:
    """Of the first `kept` tokens of a commit: those that it brings, else those of its rows."""
    if commit.logprobs:
        return list(commit.logprobs[:kept])
    return logprobs(commit.rows[:kept], commit.tokens, k)


@dataclass(slots=True)
class Stats:
    """The numbers of one request.

    Seconds are wall clock; a forward shared by a batch counts in full for each.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    first_tokens: int = 0  # committed by the forward that ended the prefill
    steps: int = 0  # target forwards after that one
    drafts: int = 0  # steps that had a draft
    drafted: int = 0
    accepted: int = 0
    # [tested, accepted] at draft depth 1, 2, ...
    by_depth: list[list[int]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)  # forwards by model
    rows: dict[str, int] = field(default_factory=dict)  # tokens that these computed, by model
    checks: int = 0  # single tokens that a form was asked about, where a method asks so
    # what became of the questions that its constraint had to other processes
    outside: dict[str, int] = field(default_factory=dict)
    draft_s: float = 0.0
    target_s: float = 0.0
    host_s: float = 0.0
    queue_s: float = 0.0  # until its first forward began
    prefill_s: float = 0.0  # until the forward that ended the prefill was through
    ttft_s: float = 0.0
    total_s: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)  # what the method tells of its run

    def called(
        self,
        model: str,
        seconds: float,
        step: bool,
        elapsed: float,
        forwards: int = 1,
        rows: int = 0,
    ) -> None:
        """Forwards this request took part in, and the rows that they computed for it; `step`: a
        whole one of the target on its text.
        """
        if not self.calls:
            self.queue_s = max(0.0, elapsed - seconds)
        self.calls[model] = self.calls.get(model, 0) + forwards
        self.rows[model] = self.rows.get(model, 0) + rows
        if model == "target":
            self.target_s += seconds
        else:
            self.draft_s += seconds
        if step and self.prefill_s:
            self.steps += 1
        elif step:
            self.prefill_s = elapsed

    def committed(self, commit: Commit, kept: int, length: int, elapsed: float) -> None:
        """`kept` of the commit's tokens became final, `elapsed` seconds after the request began.

        `length`: tokens of its text's output now.
        """
        if not self.steps:
            self.first_tokens = max(self.first_tokens, length)
        if not self.ttft_s:
            self.ttft_s = elapsed
        self.drafts += commit.drafted > 0
        self.drafted += commit.drafted
        if commit.drafted:
            self.accepted += sum(source != "target" for source in commit.sources[:kept])
        for depth, accepted in commit.tested:
            while len(self.by_depth) < depth:
                self.by_depth.append([0, 0])
            self.by_depth[depth - 1][0] += 1
            self.by_depth[depth - 1][1] += accepted

    def ended(self, tokens: int, elapsed: float) -> None:
        """The request is over with `tokens` tokens."""
        self.tokens = tokens
        self.total_s = elapsed
        self.host_s = max(0.0, elapsed - self.draft_s - self.target_s)

    @property
    def paced(self) -> tuple[int, int]:
        """(tokens, steps) that `mat` is made of. Where nothing was committed before the second
        step, or all was, the forward that ended the prefill counts as a step too.
        """
        if self.steps and self.first_tokens:
            return self.tokens - self.first_tokens, self.steps
        return self.tokens, self.steps + 1

    @property
    def mat(self) -> float:
        """Tokens of the result a step, over all steps after prefill; plain decoding = 1.0."""
        tokens, steps = self.paced
        return tokens / steps if self.tokens or self.steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """After prefill."""
        later = self.tokens - self.first_tokens
        start = self.ttft_s if self.first_tokens else self.prefill_s
        return later / max(self.total_s - start, 1e-9) if later else 0.0

    @property
    def tpot_s(self) -> float:
        """Seconds a token after prefill."""
        return 1 / self.tokens_per_s if self.tokens_per_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__slots__}
        return {**own, "MAT": self.mat, "tokens_per_s": self.tokens_per_s, "tpot_s": self.tpot_s}


def noted(engine: Any, prepared: Sequence[Any], seconds: float, forwards: int) -> None:
    """Takes note of so many forwards, each of what follows the one before it, for the model's costs
    and the requests' statistics. `prepared`: of engine.forwards.Prepared.
    """
    first = prepared[0].entry
    rows = sum(part.job.rows_before for part in prepared) // len(prepared)
    if first.for_target:
        unfinished = any(not part.whole for part in prepared)
        texts = sum(len(part.job.tokens) - len(part.job.rows) for part in prepared)
        engine.texts = texts if unfinished else 0
    layers = prepared[0].job.layers
    costs = engine.costs_of(first.model, first.model.computed_by, layers)
    if first.model.width:  # a piece that an encoder kept for later computes nothing
        costs.note(first.model.width, seconds / forwards, rows)
    own = first.ask.model != "target" or first.for_target or layers is None
    name = first.ask.model if own else "layers"
    stepped: dict[Any, bool] = {}  # whether it was a whole forward over a text of the request
    computed: Counter[Any] = Counter()  # tokens of each request
    for part in prepared:
        entry, live = part.entry, part.entry.live
        computed[live] += len(part.job.tokens)
        quiet = live.ctx.branches[entry.ask.branch].quiet
        step = part.whole and entry.task is not None and entry.for_target and not quiet
        stepped[live] = stepped.get(live, False) or step
    for live, step in stepped.items():
        elapsed = time.perf_counter() - live.started
        live.ctx.stats.called(name, seconds, step, elapsed, forwards, computed[live])
