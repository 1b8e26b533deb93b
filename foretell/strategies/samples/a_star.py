"""A* decoding: the most promising partial answer goes on by several next steps.

An answer is written in steps, such as paragraphs. Of all partial answers the one with the smallest
f = g + 1 - r is taken, and `k` next steps are drawn after it, side by side. r, from 0 to 1, is the
reward of what is written so far, and g adds up how much r has risen on the way, so that f never
falls: it is the quality that was lost. The first whole answer that is taken is the result, or the
best by reward of the first `goals`. Where the reward tells good steps from bad ones, few of the bad
ones are ever continued.

Paper: Chatziveroglou, A*-Decoding: Token-Efficient Inference Scaling, arXiv:2505.13672
Guarantee: lossy: the reward decides beside the model, on purpose
Cost: target 1
Needs: a reward of partial texts, from 0 to 1, see `foretell methods`; a tokenizer
Trains: nothing
Try: --method a-star --reward "keywords:words=return sum"
Differs:
- k, the end of a step and the budget are ours, the paper's are not known
- g, of which notes on the paper say that it adds up rises of the reward, is the smallest that keeps
f from falling
- of equal steps after one text one is kept; at most `frontier` partial answers are kept, the best
- where `tokens` or the request's budget are spent, the finished answer of the highest reward is
the result, or the best partial one, with the reason `budget`
- no drafter is asked: the steps of a text are drawn side by side
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from foretell.core.context import Context
from foretell.core.refusals import refuse_source
from foretell.core.settings import Range
from foretell.core.spending import REASON, Spent
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Drop, Finish, Message, Reply, Steps, Together
from foretell.errors import BadConfig
from foretell.rewards.base import Reward, needs_partial, needs_text, score_outputs
from foretell.speculation.strategy import Strategy, verify_and_commit
from foretell.strategies.samples.samples import fork_samples


@dataclass(order=True)
class Partial:
    """A partial answer, in the order in which they are taken."""

    cost: float  # f
    quality_loss: float  # 1 - r: of equal ones the better
    depth: int  # negative: and the longer
    branch: int
    total_rise: float = field(compare=False, default=0.0)  # g


@dataclass(frozen=True)
class AStar(Strategy):
    """Plain sampling with k=1."""

    reward: Reward | None = None  # what partial answers are worth; there must be one
    k: Annotated[int, Range(1, 64)] = 4  # steps after a partial answer
    end: str = "\n\n"  # of a step
    longest: Annotated[int, Range(1, 4096)] = 128  # tokens of a step
    # whole answers that are taken, of which the one of the highest reward is kept
    goals: Annotated[int, Range(1, 64)] = 1
    frontier: Annotated[int, Range(1, 256)] = 64  # partial answers that are kept
    # that may be drawn in all; 0: as many as it takes
    tokens: Annotated[int, Range(0, 1 << 31)] = 0

    drawn_at = 0.8

    @property
    def most_texts(self) -> int:
        return self.frontier + self.k

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is None:
            raise BadConfig("a-star: needs a reward; give one, as in reward=keywords:words=dog")
        if not self.end:
            raise BadConfig("a-star:end: is empty; give the text that ends a step")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        needs_text("a-star", ctx, self.reward)
        needs_partial("a-star", self.reward)
        refuse_source("a-star", ctx.request)
        return self._run_steps(ctx)

    def _run_steps(self, ctx: Context) -> Steps:
        heap = [Partial(1.0, 1.0, 0, ctx.branch)]
        finished: list[tuple[float, int]] = []
        try:
            taken_answers = yield from self.search_answers(ctx, heap, finished)
        except Spent:
            taken_answers = []
        has_answer = bool(taken_answers)
        if has_answer:
            best_branch = min(taken_answers, key=lambda partial: partial.quality_loss).branch
        else:
            best_branch = max(finished)[1] if finished else heap[0].branch
        for branch in [branch for branch in ctx.branches if branch != best_branch]:
            if not ctx.branches[branch].quiet:
                yield Drop(branch)
        yield Finish(
            best_branch, (ctx.branches[best_branch].reason or "stop") if has_answer else REASON
        )

    def search_answers(
        self, ctx: Context, heap: list[Partial], finished: list[tuple[float, int]]
    ) -> Generator[Message, Any, list[Partial]]:
        """Opens partial answers until `goals` whole ones were taken, or all that there are; returns
        them, none where the tokens were spent before.

        `finished`: (reward, branch) of those that were seen to end, none dropped.
        """
        drawn_tokens = 0
        taken_answers: list[Partial] = []
        while heap and len(taken_answers) < self.goals:
            best_partial = heap[0]
            if ctx.branches[best_partial.branch].reason is not None:
                taken_answers.append(heapq.heappop(heap))
                continue
            if self.tokens and drawn_tokens >= self.tokens:
                return []
            new_branches = yield from fork_samples(ctx, self.k, start_branch=best_partial.branch)
            output_length = len(ctx.branches[best_partial.branch].output)
            token_room = self.tokens - drawn_tokens if self.tokens else self.k * self.longest
            step_limit = max(1, min(self.longest, token_room // self.k))
            yield Together([self.draw_step(ctx.on(branch), step_limit) for branch in new_branches])
            drawn_tokens += sum(
                len(ctx.branches[branch].output) - output_length for branch in new_branches
            )
            new_branches = yield from self.keep_different(ctx, new_branches)
            branch_rewards = yield from self.score_branches(ctx, new_branches)
            heapq.heappop(heap)
            for branch, branch_reward in zip(new_branches, branch_rewards, strict=True):
                total_rise = best_partial.total_rise + max(
                    0.0, branch_reward - (1 - best_partial.quality_loss)
                )
                depth = best_partial.depth - 1
                heapq.heappush(
                    heap,
                    Partial(
                        total_rise + 1 - branch_reward, 1 - branch_reward, depth, branch, total_rise
                    ),
                )
                if ctx.branches[branch].reason is not None:
                    finished.append((branch_reward, branch))
            heap[:], dropped_branches = keep_best(heap, self.frontier)
            finished[:] = [
                finished_answer
                for finished_answer in finished
                if finished_answer[1] not in dropped_branches
            ]
            yield from self.drop_branches(ctx, dropped_branches)
        return taken_answers

    def draw_step(self, ctx: Context, max_tokens: int) -> Generator[Message, Any, None]:
        """Draws the next step on its branch, of at most so many tokens."""
        decode = ctx.request.text
        assert decode is not None, "refused before by `needs_text`"
        step_start = len(ctx.output)
        for _ in range(max_tokens):
            tree = TokenTree(ctx.tokens[-1])
            reply: Reply = yield Ask(tree, branch=ctx.branch)
            _, committed = yield from verify_and_commit(ctx, tree, reply)
            if committed.reason or self.end in decode(list(ctx.output[step_start:])):
                return

    def keep_different(
        self, ctx: Context, new_branches: Sequence[int]
    ) -> Generator[Message, Any, list[int]]:
        """Keeps one branch of each text, and drops the others."""
        branch_by_text: dict[tuple[int, ...], int] = {}
        for branch in new_branches:
            branch_by_text.setdefault(tuple(ctx.branches[branch].output), branch)
        yield from self.drop_branches(ctx, set(new_branches) - set(branch_by_text.values()))
        return list(branch_by_text.values())

    def drop_branches(self, ctx: Context, branches: Iterable[int]) -> Generator[Message, Any, None]:
        """Drops branches; the request's own stays: it is the answer if the request is ended from
        outside.
        """
        for branch in branches:
            if branch != ctx.branch:
                yield Drop(branch)

    def score_branches(
        self, ctx: Context, new_branches: Sequence[int]
    ) -> Generator[Message, Any, list[float]]:
        """The rewards of these branches' texts; 0 where there is none. Raises BadConfig."""
        assert self.reward is not None, "refused when it was made"
        outputs = [ctx.branches[branch].output for branch in new_branches]
        text_rewards = yield from score_outputs(ctx, self.reward, outputs)
        for text_reward in text_rewards:
            if text_reward > 1 or -float("inf") < text_reward < 0:
                reward_name = self.reward.spec_name
                raise BadConfig(
                    f"a-star: the reward {reward_name!r} gave {text_reward:.4g}, and the search "
                    "needs numbers from 0 to 1; take another reward, or bring its numbers to "
                    "that range"
                )
        return [max(0.0, text_reward) for text_reward in text_rewards]


def keep_best(heap: list[Partial], count: int) -> tuple[list[Partial], set[int]]:
    """The best partial answers, and the branches of the others."""
    if len(heap) <= count:
        return heap, set()
    best_partials = heapq.nsmallest(count, heap)
    return best_partials, {partial.branch for partial in heap} - {
        partial.branch for partial in best_partials
    }
