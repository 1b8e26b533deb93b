"""Self-play tree search: the model judges its own answer, and refines it where it falls short.

Asked whether an answer keeps to all that its prompt demands, the model goes through the demands one
by one and ends with yes or no; the share of yes among several such judgements is the answer's
score. Where it is not above `gate`, the first judgement of the majority is shown to the model, and
it writes several refinements, which are judged in turn. The best `keep` of them are refined again,
down to `depth`. All judgements of a level run side by side, as do its refinements, and those of one
text share its rows. Statistics count both, as notes `judgements` and `refinements`; where answers
were refined, the note `first` tells at which place of the samples the first answer is, from 0 on.

Paper: Cheng et al., SPaR: Self-Play with Tree-Search Refinement to Improve Instruction-Following in
Large Language Models, arXiv:2412.11605
Guarantee: lossy: a refined answer has another distribution than a sample, on purpose
Cost: target 1, and as many forwards as its longest judgement and refinement, level by level
Needs: a tokenizer; room in the context for a judgement of the answer; what the inner drafter needs
Trains: nothing; `foretell train pairs` makes pairs of what it finds, for `foretell train dpo`
Differs:
- the first answer is judged too, and is the result where it passes; the paper starts the search
from answers that are known to be bad
- yes and no are whole words, and a judgement ends with its verdict
- judgements without a verdict do not vote; those of an answer whose votes are even are drawn again,
`tries` times in all, and then the answer is left out; so are refinements without their two marks
- equal answers are judged once, and a refinement that was there before is left out
- a level keeps its best; drawing it by scores, and the depth-first search, are not here
- a refinement that does not have the form of the request (a regex, a schema) is left out; penalties
and other options of tokens hold for the first answer alone
- questions are asked in other words, and read the prompt as text: of a chat with its roles' names
- pairs of answers are trained on by `foretell train dpo`; critiques and refinements are not
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.refusals import refuse_options, refuse_source
from foretell.core.settings import Range
from foretell.core.spending import Spent
from foretell.core.types import Commit, Drop, Finish, Fork, Message, Sampling, Steps
from foretell.errors import PromptTooLong
from foretell.rewards.base import needs_text
from foretell.rewards.questions import LEAST, Speaker, answer_questions, count_questions
from foretell.strategies.samples import refinement
from foretell.strategies.samples.refinement import (
    Node,
    judging_turns,
    refined,
    refining_turns,
    sort_best_first,
    tally_verdicts,
)
from foretell.strategies.samples.samples import Samples

FRAME = 24  # tokens that a chat template may put around a turn
UNTOLD = "a refinement is written after another prompt"


@dataclass
class Search:
    """A request's search. `judged`: (score, critique) of texts, None: no majority was found."""

    prompt: str
    speaker: Speaker
    blank: int = 0  # a branch with the prompt alone
    nodes: list[Node] = field(default_factory=list)
    verdicts: dict[str, tuple[float, str] | None] = field(default_factory=dict)

    def tokens_behind(self, remaining_room: int) -> int:
        """Tokens to leave behind a judgement: the next question, and half of what is left."""
        return (
            remaining_room + len(self.speaker.words.encode(refinement.REFINE.encode())) + FRAME
        ) // 2


@dataclass(frozen=True)
class Spar(Samples):
    """Plain sampling with depth=0, or what the inner drafter makes of it."""

    depth: Annotated[int, Range(0, 16)] = 3  # refinements of refinements
    branch: Annotated[int, Range(1, 16)] = 3  # refinements of an answer
    keep: Annotated[int, Range(1, 16)] = 2  # answers of a level that are refined
    votes: Annotated[int, Range(1, 64)] = 5  # judgements of an answer
    gate: Annotated[float, Range(0, 1)] = 0.5  # a score above it ends the search
    tries: Annotated[int, Range(1, 16)] = 3  # at a majority, and at a refinement between its marks
    t: Annotated[float, Range(0, 100)] = 0.7  # temperature of judgements and refinements
    critique: Annotated[int, Range(8, 1 << 16)] = 2048  # tokens of a judgement
    # tokens of a refinement, with the thoughts before it
    refined: Annotated[int, Range(8, 1 << 16)] = 3072
    inner: Drafter | None = None  # drafts for all of them

    def run(self, ctx: Context) -> Steps:
        """Raises Unsupported, BadConfig or PromptTooLong, before anything runs."""
        if not self.depth:
            return self.draw_sample(ctx)
        refuse_options("spar", ctx.request.sampling, {"logprobs": UNTOLD})
        refuse_source("spar", ctx.request)
        needs_text("spar", ctx)
        speaker = Speaker.find_speaker(ctx, "spar")
        speaker.check_writes(f"{refinement.JUDGE}{refinement.REFINE}")
        decode = ctx.request.text
        assert decode is not None, "refused before by `needs_text`"
        search = Search(decode(list(ctx.tokens)), speaker)
        answer_limit = ctx.limit - len(ctx.tokens)
        question_length = len(speaker.prompt(refining_turns(search.prompt, "", "")))
        needed_tokens = question_length + answer_limit + FRAME + 2 * LEAST
        if needed_tokens > speaker.model.context:
            raise PromptTooLong(
                f"spar: to judge and refine an answer of up to {answer_limit} tokens takes a "
                f"context of {needed_tokens}, and {speaker.model.name} holds "
                f"{speaker.model.context}; lower max_new_tokens, shorten the prompt, or give "
                "depth=0"
            )
        return self._run_steps(ctx, search)

    def _run_steps(self, ctx: Context, search: Search) -> Steps:
        (search.blank,) = yield Fork(ctx.branch)
        yield from self.draw_sample(ctx)
        search.nodes.append(node_of(ctx, ctx.branch))
        with suppress(Spent):  # the best by then
            yield from self.search_levels(ctx, search)
        sorted_nodes = sort_best_first(search.nodes)
        scored_answers = []
        for node in sorted_nodes:
            branch = ctx.branches[node.branch]
            scored_answers.append((list(branch.output), node.score, branch.reason or "stop"))
        best_branch = sorted_nodes[0].branch
        if len(sorted_nodes) > 1:
            ctx.stats.notes["first"] = sorted_nodes.index(search.nodes[0])
        for handle in [handle for handle in ctx.branches if handle != best_branch]:
            yield Drop(handle)
        yield Finish(best_branch, scored_answers[0][2], scored_answers)

    def search_levels(self, ctx: Context, search: Search) -> Generator[Message, Any, None]:
        """Finds nodes, level by level, until the score of one is above the gate."""
        level_nodes = yield from self.judge_nodes(ctx, search, search.nodes[:1])
        for _ in range(self.depth):
            if not level_nodes or max(node.score for node in level_nodes) > self.gate:
                return
            best_nodes = sort_best_first(level_nodes)[: self.keep]
            new_nodes = yield from self.refine_nodes(ctx, search, best_nodes)
            level_nodes = yield from self.judge_nodes(ctx, search, new_nodes)
            search.nodes += level_nodes

    def judge_nodes(
        self, ctx: Context, search: Search, nodes: Sequence[Node]
    ) -> Generator[Message, Any, list[Node]]:
        """Judges these nodes; returns those with a majority, with their scores."""
        pending_texts = [node.text for node in nodes]
        for _ in range(self.tries):
            if not pending_texts:
                break
            questions = [judging_turns(search.prompt, text) for text in pending_texts]
            vote_counts = [self.votes] * len(pending_texts)
            judgement_groups = yield from answer_questions(
                ctx, search.speaker, questions, vote_counts, Sampling(temperature=self.t),
                self.critique, self.inner, refinement.SETTLED.search, search.tokens_behind,
            )  # fmt: skip
            count_questions(ctx, "judgements", sum(vote_counts))
            for text, judgements in zip(pending_texts, judgement_groups, strict=True):
                search.verdicts[text] = tally_verdicts(judgements)
            pending_texts = [text for text in pending_texts if search.verdicts[text] is None]
        judged_nodes = []
        for node in nodes:
            verdict = search.verdicts[node.text]
            if verdict is not None:
                node.score, node.critique = verdict
                judged_nodes.append(node)
        return judged_nodes

    def refine_nodes(
        self, ctx: Context, search: Search, level_nodes: Sequence[Node]
    ) -> Generator[Message, Any, list[Node]]:
        """New answers, whose texts were not there before."""
        missing_counts = [self.branch] * len(level_nodes)
        sampling = Sampling(temperature=self.t, stop=("[[end]]",))
        new_nodes: list[Node] = []
        for _ in range(self.tries):
            open_indices = [index for index, count in enumerate(missing_counts) if count]
            if not open_indices:
                break
            nodes = [level_nodes[index] for index in open_indices]
            questions = [refining_turns(search.prompt, node.text, node.critique) for node in nodes]
            copy_counts = [missing_counts[node_index] for node_index in open_indices]
            refinement_groups = yield from answer_questions(
                ctx, search.speaker, questions, copy_counts, sampling, self.refined, self.inner
            )
            count_questions(ctx, "refinements", sum(copy_counts))
            for node_index, texts in zip(open_indices, refinement_groups, strict=True):
                for text in texts:
                    tokens = self.encode_answer(ctx, search, refined(text))
                    if not tokens:
                        continue
                    missing_counts[node_index] -= 1
                    (branch,) = yield Fork(search.blank)
                    yield Commit(tokens, torch.empty(0), branch)
                    node = node_of(ctx, branch)
                    if node.text in {*search.verdicts, *(new_node.text for new_node in new_nodes)}:
                        yield Drop(branch)
                    else:
                        new_nodes.append(node)
        return new_nodes

    def encode_answer(self, ctx: Context, search: Search, text: str) -> list[int]:
        """Tokens of a refined answer and its end; none where it is empty or has another form."""
        tokens = search.speaker.words.encode(text.encode("utf-8", "replace"))
        prompt_branch = ctx.branches[search.blank]
        guide = prompt_branch.sampler.guide
        if guide is not None:
            fits_limit = len(prompt_branch.tokens) + len(tokens) <= prompt_branch.limit
            return tokens if fits_limit and guide.tracker.whole(tokens) else []
        end_tokens = [token for token in ctx.engine.eos if token in prompt_branch.sampler.stops]
        return [*tokens, *end_tokens[:1]] if tokens else []


def node_of(ctx: Context, branch: int) -> Node:
    decode = ctx.request.text
    assert decode is not None, "refused before by `needs_text`"
    return Node(branch, decode(list(ctx.branches[branch].output)))
