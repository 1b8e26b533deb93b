"""Reasons without end in rounds: a segment of thoughts, its summary, and on from the summary alone.

A round begins with the question and the summary of the rounds before, and writes a segment. A model
that was trained for it ends the segment with a summary between <summary> and </summary>; any other
one writes until `summary` tokens are left of the segment, and is asked for a summary then. The next
round knows question and summary only, so no text is ever longer than question, summary and segment,
however long all thoughts are together. A round that ends without a summary has the answer: it is
after the last </summary> of the output, which is the text of all rounds as it is written. Notes of
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
model is asked in words, with ask=no it is made to go on after </think> and <summary>; the released
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
from typing import Annotated, Any

import torch

from foretell.core.context import Branch, Context
from foretell.core.drafter import Drafter
from foretell.core.refusals import refuse_options, refuse_source
from foretell.core.settings import Range
from foretell.core.types import Ask, Commit, Drop, Finish, Message, Open, Steps
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
    """Plain decoding with rounds=1, or what the inner drafter makes of it."""

    rounds: Annotated[int, Range(1, 10000)] = 50
    # tokens of a round at most, its summary included
    segment: Annotated[int, Range(16, 1 << 24)] = 8192
    # tokens of a summary at most, its marks included
    summary: Annotated[int, Range(8, 1 << 20)] = 2048
    ask: bool = True  # whether a summary is asked for in words where the model writes none itself
    inner: Drafter | None = None  # drafts for all of it

    def run(self, ctx: Context) -> Steps:
        """Raises Unsupported, BadConfig or PromptTooLong, before anything runs."""
        room = min(self.segment, ctx.models["target"].context - len(ctx.tokens))
        fits = ctx.request.sampling.max_new_tokens <= room
        if self.rounds == 1 or (fits and ctx.sampler.guide is not None):
            return self.draw_sample(ctx)
        refuse_options(NAME, ctx.request.sampling, REFUSED)
        refuse_source(NAME, ctx.request)
        return self._run_steps(ctx, Plan(ctx, NAME, self))

    def _run_steps(self, ctx: Context, plan: Plan) -> Steps:
        full_text = ctx.branches[ctx.branch]  # shows what is written; no forward reads it
        full_text.limit = len(full_text.tokens) + ctx.request.sampling.max_new_tokens
        notes = ctx.stats.notes
        notes |= {"rounds": 0, "forced": 0, "longest": 0}
        history: list[int] = []
        for round_number in range(1, self.rounds + 1):
            prompt = plan.prompt(history)
            if len(prompt) >= plan.model.context:
                break
            round_branch: int = yield Open(prompt)
            round_context = ctx.on(round_branch)
            if round_number == 1:
                round_context.rng = ctx.rng  # a text of one round has the draws of plain decoding
            is_last = round_number == self.rounds
            writing = self.write_round(ctx, round_context, plan, bool(history), is_last)
            summary_start = yield from writing
            round_text = ctx.branches[round_branch]
            notes["rounds"] = round_number
            notes["longest"] = max(notes["longest"], len(round_text.tokens))
            if full_text.reason is not None:
                return
            if summary_start is None:
                break
            history = plan.history(round_text.output[summary_start:]) or history
            yield Drop(round_branch)
        yield Finish(ctx.branch, "length")

    def write_round(
        self, ctx: Context, round_context: Context, plan: Plan, has_history: bool, is_last: bool
    ) -> Generator[Message, Any, int | None]:
        """Writes a segment and its summary; returns where in the round's output the summary begins,
        None: it has none.
        """
        full_text = ctx.branches[ctx.branch]
        round_text = round_context.branches[round_context.branch]
        prompt_length = len(round_text.tokens)
        missing = max(0, ctx.request.sampling.min_new_tokens - len(full_text.output))
        round_text.sampler = sampler_of(ctx, round_text, ctx.engine.eos, min_new_tokens=missing)
        remaining_tokens = full_text.limit - len(full_text.tokens)
        round_room = min(plan.segment, plan.model.context - prompt_length)
        is_last = is_last or remaining_tokens <= round_room or round_room <= plan.reserve
        max_tokens = min(remaining_tokens, round_room)
        round_text.limit = prompt_length + (max_tokens if is_last else round_room - plan.reserve)
        watch = Watch(plan.words)
        for token in plan.tail:
            watch.push(token)
        watch.length = 0

        def over() -> bool:
            """Whether a summary of the model's own is whole. What has begun may be finished."""
            summary_begun = watch.ends.get(SUMMARY)
            if summary_begun is not None:
                summary_end = summary_begun + plan.summary + len(plan.close)
                round_text.limit = prompt_length + min(max_tokens, summary_end)
            elif THOUGHT in watch.ends:
                round_text.limit = prompt_length + max_tokens
            return summary_begun is not None and SUMMED in watch.ends

        yield from self.continue_round(ctx, round_context, watch, over)
        summary_start = watch.ends.get(SUMMARY)
        if summary_start is not None and SUMMED not in watch.ends:
            yield from self.show_marks(ctx, plan.close)
        is_done = is_last or full_text.reason is not None or THOUGHT in watch.ends
        if summary_start is not None or is_done:
            return summary_start
        forced = self.force_summary(ctx, round_context, plan, watch.thinking, has_history)
        return (yield from forced)

    def force_summary(
        self, ctx: Context, round_context: Context, plan: Plan, thinking: bool, has_history: bool
    ) -> Generator[Message, Any, int | None]:
        """Makes the model write a summary; returns where it begins."""
        round_text = round_context.branches[round_context.branch]
        ctx.stats.notes["forced"] += 1
        opening_marks = plan.opening_marks[thinking]
        yield from self.show_marks(ctx, opening_marks)
        if ctx.branches[ctx.branch].reason is not None:
            return None
        asking_tokens = plan.summary_questions[has_history] if self.ask else opening_marks
        yield Commit(asking_tokens, torch.empty(0), round_context.branch)
        changes: dict[str, Any] = {"min_new_tokens": 0, "ignore_eos": False}
        round_text.sampler = sampler_of(ctx, round_text, plan.speaker.ends, **changes)
        close_length = 0 if self.ask else len(plan.close)
        round_text.limit = len(round_text.tokens) + plan.summary + close_length
        summary_start = len(round_text.output)
        watch = Watch(plan.words, summary_start, {SUMMARY: summary_start})
        yield from self.continue_round(ctx, round_context, watch, lambda: SUMMED in watch.ends)
        if SUMMED not in watch.ends:
            yield from self.show_marks(ctx, plan.close)
        return summary_start

    def show_marks(self, ctx: Context, tokens: list[int]) -> Generator[Message, Any, None]:
        """Shows marks that no model wrote."""
        if ctx.branches[ctx.branch].reason is None:
            yield Commit(tokens, torch.empty(0), ctx.branch, [NAME] * len(tokens))

    def continue_round(
        self, ctx: Context, round_context: Context, watch: Watch, is_over: Callable[[], bool]
    ) -> Generator[Message, Any, None]:
        """Goes on with a round to an end, its limit, or until it is over, and shows its text."""
        full_text = ctx.branches[ctx.branch]
        round_text = round_context.branches[round_context.branch]
        round_steps = self.draw_sample(round_context)
        step_reply: Any = None
        is_done = False
        try:
            while not is_done and full_text.reason is None:
                if len(round_text.tokens) >= round_text.limit:
                    break
                message = round_steps.send(step_reply)
                is_ask = isinstance(message, Ask | list)
                round_text.quiet = not is_ask  # its forwards are the text's steps
                step_reply = yield message
                round_text.quiet = True
                if isinstance(message, Commit) and message.branch == round_context.branch:
                    is_done = yield from self.show_commit(ctx, round_text, message, watch, is_over)
        finally:
            round_text.quiet = True
            round_steps.close()

    def show_commit(
        self,
        ctx: Context,
        round_text: Branch,
        message: Commit,
        watch: Watch,
        is_over: Callable[[], bool],
    ) -> Generator[Message, Any, bool]:
        """Shows what a round has just written, up to where it is over, and returns whether it is.

        An end after a summary is not shown: the whole text goes on.
        """
        shown_count = 0
        is_done = False
        for token in message.tokens:
            if SUMMARY in watch.ends and token in round_text.sampler.stops:
                is_done = True
                break
            shown_count += 1
            watch.push(token)
            is_done = is_over()
            if is_done or watch.length >= round_text.limit - len(round_text.sampler.prompt):
                break  # a draft may have gone further
        if shown_count:
            tokens, rows = message.tokens[:shown_count], message.rows[:shown_count]
            sources = message.sources[:shown_count]
            yield Commit(tokens, rows, ctx.branch, sources, message.drafted, message.tested)
        return is_done
