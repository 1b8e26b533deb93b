"""What `foretell longbench` measures: tasks, lengths, and cache policies at several budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.errors import BadConfig
from foretell.longbench.tasks import TASKS
from foretell.spec import build_cache_policy

if TYPE_CHECKING:
    from foretell.kv.base import KV

FULL = "none"  # the whole cache
PERPLEXITY = "perplexity"  # beside TASKS
# How questions are put. `single`: context and question are one prompt, so that a policy knows what
# is asked when it gives up rows of the context.
MODES = ("single", "requests", "turns")
SHORTEST = 256  # tokens


@dataclass(frozen=True)
class Contender:
    """A cache policy at a budget. `kv`: what `kv=` takes, None the whole cache."""

    spec: str
    budget: str  # as it was given; "" as the spec has it
    kv: KV | None

    @property
    def name(self) -> str:
        return f"{self.spec} at {self.budget}" if self.budget else self.spec


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Raises BadConfig or UnknownMethod for what cannot be measured."""

    model: str = "demo"
    dtype: str = "auto"
    device: str | None = None
    backend: str = "auto"
    kv: tuple[str, ...] = ()  # the whole cache is always measured, before these
    budgets: tuple[str, ...] = ()  # numbers of rows, or shares such as 10% or 0.1
    tasks: tuple[str, ...] = ("needles", "keys")
    modes: tuple[str, ...] = ("requests", "turns")
    lengths: tuple[int, ...] = (2048, 4096)
    limit: int = 5  # contexts of each task and length
    seed: int = 0
    text: str | None = None  # a file whose text perplexity is measured on

    def __post_init__(self) -> None:
        known_tasks = (*TASKS, PERPLEXITY)
        for option_name, given_names, expected in (
            ("--tasks", self.tasks, known_tasks),
            ("--modes", self.modes, MODES),
        ):
            if not given_names:
                raise BadConfig(
                    f"{option_name}: names nothing; one or several of {', '.join(expected)}"
                )
            for given_name in given_names:
                if given_name not in expected:
                    raise BadConfig.field(option_name, given_name, f"one of {', '.join(expected)}")
        if not self.lengths:
            raise BadConfig("--lengths: names nothing; numbers of tokens, as in 2048,4096")
        for length in self.lengths:
            if length < SHORTEST:
                raise BadConfig.field("--lengths", length, f"at least {SHORTEST} tokens")
        if self.limit < 1:
            raise BadConfig.field("--limit", self.limit, "at least 1 context")
        if self.text is not None and PERPLEXITY not in self.tasks:
            raise BadConfig(f"--text: {PERPLEXITY} alone reads it; add --tasks {PERPLEXITY}")
        if self.budgets and not any(spec != FULL for spec in self.kv):
            raise BadConfig("--budgets: no cache policy is named; add --kv, as in --kv snapkv")
        for length in self.lengths:
            self.contenders(length)

    def contenders(self, length: int) -> list[Contender]:
        """Returns the full cache, then every policy at every budget for texts of so many tokens."""
        all_contenders = [Contender(FULL, "", None)]
        for spec in dict.fromkeys(self.kv):
            if spec == FULL:
                continue
            policy_config = build_cache_policy(spec)
            for budget in self.budgets or ("",):
                budgeted_policy = (
                    policy_config.with_budget(budget_rows(budget, length))
                    if budget
                    else policy_config
                )
                if budgeted_policy is None:
                    cure = "leave it out, or measure it alone"
                    raise BadConfig(f"--budgets: {spec} has no budget of rows; {cure}")
                all_contenders.append(Contender(spec, budget, budgeted_policy))
        return all_contenders


def budget_rows(budget: str, length: int) -> int:
    """The rows that a budget stands for: a share (10%, 0.1) or a number. Raises BadConfig."""
    budget_text = budget.strip()
    try:
        share = float(budget_text[:-1]) / 100 if budget_text.endswith("%") else float(budget_text)
    except ValueError:
        share = math.nan
    if 0 < share < 1 or (budget_text.endswith("%") and share == 1):
        return max(1, round(share * length))
    if not (share >= 1 and share.is_integer()) or budget_text.endswith("%"):
        expected = "a number of rows, or a share of the length such as 10% or 0.1"
        raise BadConfig.field("--budgets", budget, expected)
    return int(share)
