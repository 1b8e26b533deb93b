"""The numbers of a request, defined once for every report, plot and bench."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from foretell.core.types import Commit


def row_logprobs(
    rows: torch.Tensor, tokens: list[int], k: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Log-probabilities of n tokens by rows (n, V): each token's own, and the k best (token,
    log-probability).
    """
    entries = []
    for row, token in zip(rows.log_softmax(-1), tokens, strict=False):
        best_tokens = row.topk(min(k, len(row)))
        entries.append(
            (
                float(row[token]),
                list(zip(best_tokens.indices.tolist(), best_tokens.values.tolist(), strict=True)),
            )
        )
    return entries


def commit_logprobs(commit: Commit, kept_count: int, k: int) -> list[Any]:
    """Log-probabilities of a commit's first tokens: those it brings, else those of its rows."""
    if commit.logprobs:
        return list(commit.logprobs[:kept_count])
    return row_logprobs(commit.rows[:kept_count], commit.tokens, k)


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

    def note_call(
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

    def committed(self, commit: Commit, kept_count: int, length: int, elapsed: float) -> None:
        """Counts `kept_count` tokens of a commit as final, `elapsed` seconds after the start.

        `length`: tokens of its text's output now.
        """
        if not self.steps:
            self.first_tokens = max(self.first_tokens, length)
        if not self.ttft_s:
            self.ttft_s = elapsed
        self.drafts += commit.drafted > 0
        self.drafted += commit.drafted
        if commit.drafted:
            self.accepted += sum(source != "target" for source in commit.sources[:kept_count])
        for depth, accepted in commit.tested:
            while len(self.by_depth) < depth:
                self.by_depth.append([0, 0])
            self.by_depth[depth - 1][0] += 1
            self.by_depth[depth - 1][1] += accepted

    def note_end(self, tokens: int, elapsed: float) -> None:
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
        field_values = {name: getattr(self, name) for name in self.__slots__}
        return {
            **field_values,
            "MAT": self.mat,
            "tokens_per_s": self.tokens_per_s,
            "tpot_s": self.tpot_s,
        }


def note_forwards(engine: Any, prepared: Sequence[Any], seconds: float, forwards: int) -> None:
    """Takes note of so many forwards, each of what follows the one before it, for the model's costs
    and the requests' statistics. `prepared`: of engine.forwards.Prepared.
    """
    first_ask = prepared[0].open_ask
    rows = sum(part.job.rows_before for part in prepared) // len(prepared)
    if first_ask.for_target:
        unfinished = any(not part.whole for part in prepared)
        text_tokens = sum(len(part.job.tokens) - len(part.job.rows) for part in prepared)
        engine.texts = text_tokens if unfinished else 0
    layers = prepared[0].job.layers
    costs = engine.costs_of(first_ask.model, first_ask.model.computed_by, layers)
    if first_ask.model.width:  # a piece that an encoder kept for later computes nothing
        costs.note_forward(first_ask.model.width, seconds / forwards, rows)
    runs_fully = first_ask.ask.model != "target" or first_ask.for_target or layers is None
    name = first_ask.ask.model if runs_fully else "layers"
    stepped: dict[Any, bool] = {}  # whether it was a whole forward over a text of the request
    computed: Counter[Any] = Counter()  # tokens of each request
    for part in prepared:
        open_ask, live_request = part.open_ask, part.open_ask.live
        computed[live_request] += len(part.job.tokens)
        quiet = live_request.ctx.branches[open_ask.ask.branch].quiet
        step = part.whole and open_ask.task is not None and open_ask.for_target and not quiet
        stepped[live_request] = stepped.get(live_request, False) or step
    for live_request, step in stepped.items():
        elapsed = time.perf_counter() - live_request.started
        live_request.ctx.stats.note_call(
            name, seconds, step, elapsed, forwards, computed[live_request]
        )
