"""What an audit found: verdicts, their numbers, and for each method one line to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import foretell
from foretell.core.stats import Stats
from foretell.speculation.strategy import Speculative, Strategy

HELD = "held"
FAILED = "failed"
UNTESTED = "untested"  # nothing was drafted, so passing proves nothing
NO_CLAIM = "no claim"  # the method claims nothing here, or the check could not be run
SCHEMA = "foretell.measure.audit/2"


@dataclass
class Check:
    """The result of one experiment. `detail` says what was found, or why nothing could be."""

    name: str
    verdict: str  # HELD, FAILED, UNTESTED or NO_CLAIM
    detail: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class MethodReport:
    """All checks of one method. `line` is meant to be pasted."""

    method: str
    guarantee: str
    checks: list[Check]
    line: str = ""

    @property
    def all_held(self) -> bool:
        """Whether every claim was put to the test and none failed."""
        return not self.checks_with(FAILED) and not self.checks_with(UNTESTED)

    def checks_with(self, verdict: str) -> list[str]:
        """The names of the checks with this verdict."""
        return [check.name for check in self.checks if check.verdict == verdict]


@dataclass
class Report:
    """The result of an audit."""

    model: str
    dtype: str  # of activations, as torch names it
    matrices: str  # the number format of the weights of linear layers: int8, or the same as dtype
    device: str
    backends: dict[str, str]  # by number format audited: what computed its steps
    prompts: str  # which, and how many tokens each greedy comparison has
    methods: list[MethodReport]

    @property
    def all_held(self) -> bool:
        """Whether every claim of every method was put to the test and none failed."""
        return all(method.all_held for method in self.methods)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report JSON-ready, schema foretell.measure.audit/2."""
        return {
            "schema": SCHEMA,
            "version": foretell.__version__,
            "model": self.model,
            "dtype": self.matrices,
            "device": self.device,
            "torch": torch.__version__,
            "executors": self.backends,
            "prompts": self.prompts,
            "held": self.all_held,
            "methods": [{**asdict(method), "held": method.all_held} for method in self.methods],
        }

    def text(self) -> str:
        """Writes the report for people: one line for each check, and at the end one line for each
        method to paste.
        """
        report_lines = [f"{self.model}, {self.matrices} on {self.device}; {self.prompts}"]
        for dtype, backend in self.backends.items():
            report_lines.append(f"steps in {dtype} are computed by {backend}")
        report_lines.append("")
        for method in self.methods:
            report_lines.append(f"{method.method} ({method.guarantee})")
            for check in method.checks:
                verdict = check.verdict
                if verdict in (FAILED, UNTESTED):
                    verdict = verdict.upper()
                report_lines.append(f"  {verdict:8}  {check.name}: {check.detail}")
            report_lines.append("")
        return "\n".join([*report_lines, *(method.line for method in self.methods)])


def summary_line(report: Report, method: MethodReport) -> str:
    """Writes the line to paste: every figure with what it was taken on."""
    checks = {check.name: check for check in method.checks}
    greedy = checks[f"greedy {report.dtype}"].numbers
    summary_parts = [f"greedy {greedy['identical']}/{greedy['of']} identical"]
    if greedy["ties"]:
        summary_parts[0] += f" and {greedy['ties']} at a tie"
    summary_parts[0] += f" ({report.prompts}, {report.dtype}, {report.backends[report.dtype]})"
    if "exact bits" in checks:
        summary_parts.append(
            "exact bits {identical}/{of} random steps".format(**checks["exact bits"].numbers)
        )
    law = checks["law"].numbers
    summary_parts.append(
        "law {error:.0e} (toy model, {settings} samplings, {outcomes} outcomes)".format(**law)
        if law
        else "law not enumerated"
    )
    samples = checks["samples"].numbers
    summary_parts.append(
        "samples p={p:.2g} ({of} of {prompts} prompts, {dtype}, {power_text})".format(**samples)
        if samples
        else "samples not compared"
    )
    cache = checks["cache"]
    cache_state = {HELD: "ok", NO_CLAIM: "ok", UNTESTED: "untested", FAILED: "WRONG"}[cache.verdict]
    summary_parts.append(f"cache {cache_state} ({', '.join(cache.numbers)})")
    for verdict in (FAILED, UNTESTED):
        if names := method.checks_with(verdict):
            summary_parts.append(f"{verdict.upper()}: {', '.join(names)}")
    guarantee = method.guarantee.partition(":")[0]
    audit_title = f"foretell {foretell.__version__} audit: {report.model} {report.matrices}"
    return f"{audit_title} {method.method} {guarantee}: {'; '.join(summary_parts)}"


@dataclass(frozen=True)
class Drafts:
    """The amount that was drafted in an experiment, without which it would prove nothing."""

    expected: bool  # whether the method drafts at all
    drafted: int
    accepted: int
    cure: str = "give prompts in which it drafts"  # where nothing was drafted

    @classmethod
    def count_drafts(cls, strategy: Strategy, stats: Sequence[Stats], cure: str = cure) -> Drafts:
        drafted_count = sum(request_stats.drafted for request_stats in stats)
        accepted_count = sum(request_stats.accepted for request_stats in stats)
        return cls(isinstance(strategy, Speculative), drafted_count, accepted_count, cure)

    @property
    def was_tested(self) -> bool:
        return self.drafted > 0 or not self.expected

    def __str__(self) -> str:
        if self.drafted:
            return f"{self.accepted} of {self.drafted} drafted accepted"
        if self.expected:
            return f"nothing was drafted, so this was not put to the test; {self.cure}"
        return "this method drafts nothing"

    def verdict(self, claimed: bool, passed: bool) -> str:
        """Returns the verdict of an experiment with these drafts."""
        if not claimed:
            return NO_CLAIM
        if not passed:
            return FAILED
        return HELD if self.was_tested else UNTESTED
