"""The numbers of a request, defined once for every report, plot and bench."""

from __future__ import annotations

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
    checks: int = 0  # single tokens that a form was asked about, where a method asks so
    # what became of the questions that its constraint had to other processes
    outside: dict[str, int] = field(default_factory=dict)
    draft_s: float = 0.0
    target_s: float = 0.0
    host_s: float = 0.0
    prefill_s: float = 0.0  # until the forward that ended the prefill was through
    ttft_s: float = 0.0
    total_s: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)  # what the method tells of its run

    def called(
        self, model: str, seconds: float, step: bool, elapsed: float, forwards: int = 1
    ) -> None:
        """Forwards this request took part in; `step`: a whole one of the target on its text."""
        self.calls[model] = self.calls.get(model, 0) + forwards
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
    def mat(self) -> float:
        """Tokens of the result a step, over all steps after prefill; plain decoding = 1.0.

        Where nothing was committed before the second step, the forward that ended the prefill
        counts as a step too.
        """
        if not self.steps:
            return 1.0
        if not self.first_tokens:
            return self.tokens / (self.steps + 1)
        return (self.tokens - self.first_tokens) / self.steps

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
