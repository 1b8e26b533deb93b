"""Reasons without end in rounds: a segment of thoughts, its summary, and on from the summary alone.

A round begins with the question and the summary of the rounds before, and writes a segment. A model
that was trained for it ends the segment with a summary between <summary> and </summary>; any other
one writes until `summary` tokens are left of the segment, and is asked for a summary then. The next
round knows question and summary only, so no text is ever longer than question, summary and segment,
however long all thoughts are together. A round that ends without a summary has the answer: it is
behind the last </summary> of the output, which is the text of all rounds as it is written. Notes of
the statistics count `rounds` and summaries that were `forced`, and tell the `longest` text, in
tokens, that the model had before it.

Paper: Yan et al., InftyThink: Breaking the Length Limits of Long-Context Reasoning in Large
Language Models, arXiv:2503.06692
Guarantee: lossy: what a summary leaves out is not known later; one round alone is plain decoding
Cost: target 1, and in each later round one reading of question and summary
Needs: a tokenizer; room in the context for question, two summaries and a part of a segment
Trains: nothing; `foretell train infty` makes texts of long thoughts that a model learns it from
Differs:
- a segment that reaches its limit without a summary is summarised all the same: with ask=yes the
model is asked in words, with ask=no it is made to go on behind </think> and <summary>; the released
code takes such a text for the answer
- a summary that is too long, or has no </summary>, counts as far as it goes; that code goes back to
the summary before. Where it is empty, so does this
- a segment that has left its thoughts, and gives its answer, is not summarised any more
- where a template opens the thoughts in the prompt, the history stands before that mark
- max_new_tokens counts the tokens of all rounds, and marks that were set; options that look at the
text before look at that of their round; stop texts end all
- a text of a given form (a regex, a schema) is written in one round, as by plain decoding
- a round with fewer tokens left than a segment, and the last round, are not cut by a summary
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from foretell.core.context import Branch, Context
from foretell.core.drafter import Drafter
from foretell.core.refusals import refuse_options, refuse_source
from foretell.core.types import Ask, Commit, Drop, Finish, Message, Open, Steps
from foretell.errors import BadConfig
from foretell.strategies.samples.samples import Samples
from foretell.strategies.samples.segments import SUMMARY, SUMMED, THOUGHT, Plan, Watch, sampler_of

NAME = "infty-think"
ROUNDS = "a text of several rounds has marks and summaries between its thoughts"
REFUSED = {
    **dict.fromkeys(("regex", "json_schema", "grammar", "constraint"), ROUNDS),
    "logprobs": "marks that are set by themselves have no rows",
}


@dataclass(frozen=True)
class InftyThink(Samples):
    """With rounds=1 it is plain decoding, or what the inner drafter makes of it."""

    rounds: int = 50
    segment: int = 8192  # tokens of a round at most, its summary included
    summary: int = 2048  # tokens of a summary at most, its marks included
    ask: bool = True  # whether a summary is asked for in words where the model writes none itself
    inner: Drafter | None = None  # drafts for all of it

    def __post_init__(self) -> None:
        ranges = {"rounds": (1, 10_000), "segment": (16, 1 << 24), "summary": (8, 1 << 20)}
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                allowed = f"between {least} and {most}"
                raise BadConfig.field(f"{NAME}:{name}", getattr(self, name), allowed)

    def run(self, ctx: Context) -> Steps:
        """Raises Unsupported, BadConfig or PromptTooLong, before anything runs."""
        room = min(self.segment, ctx.models["target"].context - len(ctx.tokens))
        fits = ctx.request.sampling.max_new_tokens <= room
        if self.rounds == 1 or (fits and ctx.sampler.guide is not None):
            return self.drawn(ctx)
        refuse_options(NAME, ctx.request.sampling, REFUSED)
        refuse_source(NAME, ctx.request)
        return self._steps(ctx, Plan(ctx, NAME, self))

    def _steps(self, ctx: Context, plan: Plan) -> Steps:
        whole = ctx.branches[ctx.branch]  # shows what is written; no forward reads it
        whole.limit = len(whole.tokens) + ctx.request.sampling.max_new_tokens
        notes = ctx.stats.notes
        notes |= {"rounds": 0, "forced": 0, "longest": 0}
        history: list[int] = []
        for number in range(1, self.rounds + 1):
            prompt = plan.prompt(history)
            if len(prompt) >= plan.model.context:
                break
            handle: int = yield Open(prompt)
            view = ctx.on(handle)
            if number == 1:
                view.rng = ctx.rng  # a text of one round has the draws of plain decoding
            last = number == self.rounds
            begun = yield from self.round(ctx, view, plan, bool(history), last)
            own = ctx.branches[handle]
            notes["rounds"] = number
            notes["longest"] = max(notes["longest"], len(own.tokens))
            if whole.reason is not None:
                return
            if begun is None:
                break
            history = plan.history(own.output[begun:]) or history
            yield Drop(handle)
        yield Finish(ctx.branch, "length")

    def round(
        self, ctx: Context, view: Context, plan: Plan, later: bool, last: bool
    ) -> Generator[Message, Any, int | None]:
        """Writes a segment and its summary; returns where in the round's output the summary begins,
        None: it has none.
        """
        whole, own = ctx.branches[ctx.branch], view.branches[view.branch]
        start = len(own.tokens)
        missing = max(0, ctx.request.sampling.min_new_tokens - len(whole.output))
        own.sampler = sampler_of(ctx, own, ctx.engine.eos, min_new_tokens=missing)
        left = whole.limit - len(whole.tokens)
        room = min(plan.segment, plan.model.context - start)
        last = last or left <= room or room <= plan.reserve
        most = min(left, room)
        own.limit = start + (most if last else room - plan.reserve)
        watch = Watch(plan.words)
        for token in plan.tail:
            watch.push(token)
        watch.length = 0

        def over() -> bool:
            """Whether a summary of the model's own is whole. What has begun may be finished."""
            begun = watch.ends.get(SUMMARY)
            if begun is not None:
                own.limit = start + min(most, begun + plan.summary + len(plan.close))
            elif THOUGHT in watch.ends:
                own.limit = start + most
            return begun is not None and SUMMED in watch.ends

        yield from self.write(ctx, view, watch, over)
        begun = watch.ends.get(SUMMARY)
        if begun is not None and SUMMED not in watch.ends:
            yield from self.set(ctx, plan.close)
        if begun is not None or whole.reason is not None or last or THOUGHT in watch.ends:
            return begun
        return (yield from self.forced(ctx, view, plan, watch.thinking, later))

    def forced(
        self, ctx: Context, view: Context, plan: Plan, thinking: bool, later: bool
    ) -> Generator[Message, Any, int | None]:
        """Makes the model write a summary; returns where it begins."""
        own = view.branches[view.branch]
        ctx.stats.notes["forced"] += 1
        opened = plan.opened[thinking]
        yield from self.set(ctx, opened)
        if ctx.branches[ctx.branch].reason is not None:
            return None
        yield Commit(plan.asked[later] if self.ask else opened, torch.empty(0), view.branch)
        ends = plan.speaker.ends
        own.sampler = sampler_of(ctx, own, ends, min_new_tokens=0, ignore_eos=False)
        own.limit = len(own.tokens) + plan.summary + (0 if self.ask else len(plan.close))
        begun = len(own.output)
        watch = Watch(plan.words, begun, {SUMMARY: begun})
        yield from self.write(ctx, view, watch, lambda: SUMMED in watch.ends)
        if SUMMED not in watch.ends:
            yield from self.set(ctx, plan.close)
        return begun

    def set(self, ctx: Context, tokens: list[int]) -> Generator[Message, Any, None]:
        """Shows marks that no model wrote."""
        if ctx.branches[ctx.branch].reason is None:
            yield Commit(tokens, torch.empty(0), ctx.branch, [NAME] * len(tokens))

    def write(
        self, ctx: Context, view: Context, watch: Watch, over: Callable[[], bool]
    ) -> Generator[Message, Any, None]:
        """Goes on with a round to an end, its limit, or until it is over, and shows its text."""
        whole, own = ctx.branches[ctx.branch], view.branches[view.branch]
        steps = self.drawn(view)
        answer: Any = None
        done = False
        try:
            while not done and whole.reason is None and len(own.tokens) < own.limit:
                message = steps.send(answer)
                own.quiet = not isinstance(message, Ask | list)  # its forwards are the text's steps
                answer = yield message
                own.quiet = True
                if isinstance(message, Commit) and message.branch == view.branch:
                    done = yield from self.show(ctx, own, message, watch, over)
        finally:
            own.quiet = True
            steps.close()

    def show(
        self, ctx: Context, own: Branch, message: Commit, watch: Watch, over: Callable[[], bool]
    ) -> Generator[Message, Any, bool]:
        """Shows what a round has just written, up to where it is over, and returns whether it is.

        An end behind a summary is not shown: the whole text goes on.
        """
        count = 0
        done = False
        for token in message.tokens:
            if SUMMARY in watch.ends and token in own.sampler.stops:
                done = True
                break
            count += 1
            watch.push(token)
            done = over()
            if done or watch.length >= own.limit - len(own.sampler.prompt):
                break  # a draft may have gone further
        if count:
            part = (
                message.tokens[:count],
                message.rows[:count],
                ctx.branch,
                message.sources[:count],
            )
            yield Commit(*part, message.drafted, message.tested)
        return done
