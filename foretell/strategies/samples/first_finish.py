"""First finish search: of several samples the one that is finished first is the answer.

`n` samples are drawn side by side, one forward a step for all. As soon as one has ended, those that
could only become longer are cancelled; of equally long ones the first counts. So the answer is the
shortest of n samples at the price of n times its length. Each sample draws by itself, and may be
sped up by a drafter: inner=suffix. Where none ends within the limit, the first sample is the
answer, with the reason `length`.

Paper: Agarwal et al., First Finish Search: Efficient Test-Time Scaling in Large Language Models,
arXiv:2505.18149
Guarantee: lossy: the shortest of several samples has another distribution than a sample
Cost: target 1
Needs: what the inner drafter needs
Trains: nothing
Differs:
- the first to finish is the one of fewest tokens, whatever speed each has, so that a seed gives its
answer again; in lock-step that is the same
- a sample that is cut off by the limit counts as not finished
- votes among the first k, a later study's, are not there
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.settings import Range
from foretell.core.spending import Spent
from foretell.core.types import Drop, Finish, Message, Steps, Together
from foretell.strategies.samples.samples import Samples, fork_samples


@dataclass(frozen=True)
class FirstFinish(Samples):
    """Plain sampling with n=1, or what the inner drafter makes of it."""

    n: Annotated[int, Range(1, 256)] = 4  # samples
    inner: Drafter | None = None  # drafts for each of them

    drawn_at = 0.8

    @property
    def most_texts(self) -> int:
        return self.n

    def run(self, ctx: Context) -> Steps:
        running_branches = yield from fork_samples(ctx, self.n)
        finished: list[tuple[int, int]] = []  # (tokens, branch)
        try:
            yield Together([self.sample(ctx.on(branch), finished) for branch in running_branches])
        except Spent:
            if not finished:
                raise
        winning_branch = min(finished)[1] if finished else ctx.branch
        reason = ctx.branches[winning_branch].reason or "length"
        for branch in running_branches:
            if branch != winning_branch:
                yield Drop(branch)
        yield Finish(winning_branch, reason)

    def sample(
        self, ctx: Context, finished: list[tuple[int, int]]
    ) -> Generator[Message, Any, None]:
        """Draws a sample, as long as it may still become the first to finish."""
        sample_steps = self.draw_sample(ctx)
        step_reply: Any = None
        try:
            while not finished or (len(ctx.output) + 1, ctx.branch) < min(finished):
                step_reply = yield sample_steps.send(step_reply)
        except StopIteration:
            pass
        finally:
            sample_steps.close()
        if ctx.branches[ctx.branch].reason == "stop":
            finished.append((len(ctx.output), ctx.branch))
