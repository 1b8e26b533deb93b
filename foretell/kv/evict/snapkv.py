"""Keeps of a prompt what its last tokens attend to.

The last `window` tokens of a prompt vote: what a row got of their attention, smoothed over
`kernel` neighbours, decides whether it stays; the window itself stays. What is generated stays too.

Paper: Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv:2404.14469
Guarantee: lossy: rows of the prompt are given up; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- query heads that share a key head vote by their mean, and share its rows; the published code keeps
rows for every query head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from foretell.core.settings import Odd, OneOf, Range
from foretell.kv.base import KV, check_budget
from foretell.kv.voting import POOLS, Voted

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Snapkv(KV):
    """Counts of rows and tokens."""

    role = "evictor"
    settles = True

    budget: int = 1024  # rows of a layer's head that stay of the prompt
    window: Annotated[int, Range(1)] = 32  # last tokens, which vote and stay
    kernel: Annotated[int, Odd(1)] = 7  # neighbours that a vote is smoothed over
    pool: Annotated[str, OneOf(POOLS)] = "max"  # or mean

    def __post_init__(self) -> None:
        super().__post_init__()
        min_rows = max(1, self.window) + 1
        check_budget(
            "snapkv", self.budget, min_rows, f"a window of {self.window} and a row beside it"
        )

    def build_policy(self, target: Model) -> Voted:
        self.check_target(target)
        return Voted(self.budget, 0, window=self.window, kernel=self.kernel, pool=self.pool)
