"""A* decoding: the most promising partial answer goes on by several next steps.

An answer is written in steps, such as paragraphs. Of all partial answers the one with the smallest
f = g + 1 - r is taken, and `k` next steps are drawn behind it, side by side. r, from 0 to 1, is the
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
- of equal steps behind one text one is kept; at most `frontier` partial answers are kept, the best
- where `tokens` or the request's budget are spent, the finished answer of the highest reward is
the result, or the best partial one, with the reason `budget`
- no drafter is asked: the steps of a text are drawn side by side
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.core.context import Context
from foretell.core.refusals import refuse_source
from foretell.core.spending import REASON, Spent
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Drop, Finish, Message, Reply, Steps, Together
from foretell.errors import BadConfig
from foretell.rewards.base import Reward, needs_partial, needs_text, scored
from foretell.speculation.strategy import Strategy, settle
from foretell.strategies.samples.samples import branches


@dataclass(order=True)
class Partial:
    """A partial answer, in the order in which they are taken."""

    cost: float  # f
    lost: float  # 1 - r: of equal ones the better
    depth: int  # negative: and the longer
    branch: int
    risen: float = field(compare=False, default=0.0)  # g


@dataclass(frozen=True)
class AStar(Strategy):
    """With k=1 it is plain sampling."""

    reward: Reward | None = None  # what partial answers are worth; there must be one
    k: int = 4  # steps behind a partial answer
    end: str = "\n\n"  # of a step
    longest: int = 128  # tokens of a step
    goals: int = 1  # whole answers that are taken, of which the one of the highest reward is kept
    frontier: int = 64  # partial answers that are kept
    tokens: int = 0  # that may be drawn in all; 0: as many as it takes

    drawn_at = 0.8

    @property
    def most_texts(self) -> int:
        return self.frontier + self.k

    def __post_init__(self) -> None:
        if self.reward is None:
            raise BadConfig("a-star: needs a reward; give one, as in reward=keywords:words=dog")
        ranges = {
            "k": (1, 64),
            "longest": (1, 4096),
            "goals": (1, 64),
            "frontier": (1, 256),
            "tokens": (0, 1 << 31),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise BadConfig.field(f"a-star:{name}", value, f"between {least} and {most}")
        if not self.end:
            raise BadConfig("a-star:end: is empty; give the text that ends a step")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        needs_text("a-star", ctx, self.reward)
        needs_partial("a-star", self.reward)
        refuse_source("a-star", ctx.request)
        return self._steps(ctx)

    def _steps(self, ctx: Context) -> Steps:
        heap = [Partial(1.0, 1.0, 0, ctx.branch)]
        finished: list[tuple[float, int]] = []
        try:
            taken = yield from self.search(ctx, heap, finished)
        except Spent:
            taken = []
        whole = bool(taken)
        if whole:
            best = min(taken, key=lambda one: one.lost).branch
        else:
            best = max(finished)[1] if finished else heap[0].branch
        for branch in [branch for branch in ctx.branches if branch != best]:
            if not ctx.branches[branch].quiet:
                yield Drop(branch)
        yield Finish(best, (ctx.branches[best].reason or "stop") if whole else REASON)

    def search(
        self, ctx: Context, heap: list[Partial], finished: list[tuple[float, int]]
    ) -> Generator[Message, Any, list[Partial]]:
        """Opens partial answers until `goals` whole ones were taken, or all that there are; returns
        them, none where the tokens were spent before.

        `finished`: (reward, branch) of those that were seen to end, none dropped.
        """
        drawn = 0
        taken: list[Partial] = []
        while heap and len(taken) < self.goals:
            best = heap[0]
            if ctx.branches[best.branch].reason is not None:
                taken.append(heapq.heappop(heap))
                continue
            if self.tokens and drawn >= self.tokens:
                return []
            behind = yield from branches(ctx, self.k, start=best.branch)
            before = len(ctx.branches[best.branch].output)
            room = self.tokens - drawn if self.tokens else self.k * self.longest
            most = max(1, min(self.longest, room // self.k))
            yield Together([self.step(ctx.on(branch), most) for branch in behind])
            drawn += sum(len(ctx.branches[branch].output) - before for branch in behind)
            behind = yield from self.different(ctx, behind)
            values = yield from self.values(ctx, behind)
            heapq.heappop(heap)
            for branch, value in zip(behind, values, strict=True):
                risen = best.risen + max(0.0, value - (1 - best.lost))
                depth = best.depth - 1
                heapq.heappush(heap, Partial(risen + 1 - value, 1 - value, depth, branch, risen))
                if ctx.branches[branch].reason is not None:
                    finished.append((value, branch))
            heap[:], given_up = kept(heap, self.frontier)
            finished[:] = [one for one in finished if one[1] not in given_up]
            yield from self.drop(ctx, given_up)
        return taken

    def step(self, ctx: Context, most: int) -> Generator[Message, Any, None]:
        """Draws the next step on its branch, of at most so many tokens."""
        decode = ctx.request.text
        assert decode is not None, "refused before by `needs_text`"
        start = len(ctx.output)
        for _ in range(most):
            tree = TokenTree(ctx.tokens[-1])
            reply: Reply = yield Ask(tree, branch=ctx.branch)
            _, committed = yield from settle(ctx, tree, reply)
            if committed.reason or self.end in decode(list(ctx.output[start:])):
                return

    def different(self, ctx: Context, behind: Sequence[int]) -> Generator[Message, Any, list[int]]:
        """One branch of each text; the others are dropped."""
        first: dict[tuple[int, ...], int] = {}
        for branch in behind:
            first.setdefault(tuple(ctx.branches[branch].output), branch)
        yield from self.drop(ctx, set(behind) - set(first.values()))
        return list(first.values())

    def drop(self, ctx: Context, branches: Iterable[int]) -> Generator[Message, Any, None]:
        """The request's own branch stays: it is the answer if the request is ended from outside."""
        for branch in branches:
            if branch != ctx.branch:
                yield Drop(branch)

    def values(self, ctx: Context, behind: Sequence[int]) -> Generator[Message, Any, list[float]]:
        """The rewards of these branches' texts; 0 where there is none. Raises BadConfig."""
        assert self.reward is not None, "refused when it was made"
        outputs = [ctx.branches[branch].output for branch in behind]
        found = yield from scored(ctx, self.reward, outputs)
        for value in found:
            if value > 1 or -float("inf") < value < 0:
                name = self.reward.called
                raise BadConfig(
                    f"a-star: the reward {name!r} gave {value:.4g}, and the search needs numbers "
                    "from 0 to 1; take another reward, or bring its numbers to that range"
                )
        return [max(0.0, value) for value in found]


def kept(heap: list[Partial], count: int) -> tuple[list[Partial], set[int]]:
    """The best partial answers, and the branches of the others."""
    if len(heap) <= count:
        return heap, set()
    best = heapq.nsmallest(count, heap)
    return best, {one.branch for one in heap} - {one.branch for one in best}
