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
Guarantee: lossy: a refined answer has another law than a sample, on purpose
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
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.refusals import refuse_options, refuse_source
from foretell.core.spending import Spent
from foretell.core.types import Commit, Drop, Finish, Fork, Message, Sampling, Steps
from foretell.errors import BadConfig, PromptTooLong
from foretell.rewards.base import needs_text
from foretell.rewards.questions import LEAST, Speaker, answers, note
from foretell.strategies.samples import refinement
from foretell.strategies.samples.refinement import (
    Node,
    best_first,
    judging,
    refined,
    refining,
    tally,
)
from foretell.strategies.samples.samples import Samples

FRAME = 24  # tokens that a chat template may put around a turn
UNTOLD = "a refinement is written behind another prompt"


@dataclass
class Search:
    """A request's search. `judged`: (score, critique) of texts, None: no majority was found."""

    prompt: str
    speaker: Speaker
    blank: int = 0  # a branch with the prompt alone
    nodes: list[Node] = field(default_factory=list)
    judged: dict[str, tuple[float, str] | None] = field(default_factory=dict)

    def behind(self, room: int) -> int:
        """Tokens to leave behind a judgement: the next question, and half of what is left."""
        return (room + len(self.speaker.words.encode(refinement.REFINE.encode())) + FRAME) // 2


@dataclass(frozen=True)
class Spar(Samples):
    """With depth=0 it is plain sampling, or what the inner drafter makes of it."""

    depth: int = 3  # refinements of refinements
    branch: int = 3  # refinements of an answer
    keep: int = 2  # answers of a level that are refined
    votes: int = 5  # judgements of an answer
    gate: float = 0.5  # a score above it ends the search
    tries: int = 3  # at a majority, and at a refinement between its marks
    t: float = 0.7  # temperature of judgements and refinements
    critique: int = 2048  # tokens of a judgement
    refined: int = 3072  # tokens of a refinement, with the thoughts before it
    inner: Drafter | None = None  # drafts for all of them

    def __post_init__(self) -> None:
        ranges = {"depth": (0, 16), "votes": (1, 64), "gate": (0, 1), "t": (0, 100)}
        ranges |= dict.fromkeys(("branch", "keep", "tries"), (1, 16))
        ranges |= dict.fromkeys(("critique", "refined"), (8, 1 << 16))
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                allowed = f"between {least} and {most}"
                raise BadConfig.field(f"spar:{name}", getattr(self, name), allowed)

    def run(self, ctx: Context) -> Steps:
        """Raises Unsupported, BadConfig or PromptTooLong, before anything runs."""
        if not self.depth:
            return self.drawn(ctx)
        refuse_options("spar", ctx.request.sampling, {"logprobs": UNTOLD})
        refuse_source("spar", ctx.request)
        needs_text("spar", ctx)
        speaker = Speaker.of(ctx, "spar")
        speaker.check_writes(f"{refinement.JUDGE}{refinement.REFINE}")
        decode = ctx.request.text
        assert decode is not None, "refused before by `needs_text`"
        search = Search(decode(list(ctx.tokens)), speaker)
        longest = ctx.limit - len(ctx.tokens)
        asked = len(speaker.prompt(refining(search.prompt, "", "")))
        needed = asked + longest + FRAME + 2 * LEAST
        if needed > speaker.model.context:
            raise PromptTooLong(
                f"spar: to judge and refine an answer of up to {longest} tokens takes a context of "
                f"{needed}, and {speaker.model.name} holds {speaker.model.context}; lower "
                "max_new_tokens, shorten the prompt, or give depth=0"
            )
        return self._steps(ctx, search)

    def _steps(self, ctx: Context, search: Search) -> Steps:
        (search.blank,) = yield Fork(ctx.branch)
        yield from self.drawn(ctx)
        search.nodes.append(node_of(ctx, ctx.branch))
        with suppress(Spent):  # the best by then
            yield from self.search(ctx, search)
        order = best_first(search.nodes)
        found = []
        for node in order:
            branch = ctx.branches[node.branch]
            found.append((list(branch.output), node.score, branch.reason or "stop"))
        best = order[0].branch
        if len(order) > 1:
            ctx.stats.notes["first"] = order.index(search.nodes[0])
        for handle in [handle for handle in ctx.branches if handle != best]:
            yield Drop(handle)
        yield Finish(best, found[0][2], found)

    def search(self, ctx: Context, search: Search) -> Generator[Message, Any, None]:
        """Finds nodes, level by level, until the score of one is above the gate."""
        level = yield from self.judge(ctx, search, search.nodes[:1])
        for _ in range(self.depth):
            if not level or max(node.score for node in level) > self.gate:
                return
            fresh = yield from self.refine(ctx, search, best_first(level)[: self.keep])
            level = yield from self.judge(ctx, search, fresh)
            search.nodes += level

    def judge(
        self, ctx: Context, search: Search, nodes: Sequence[Node]
    ) -> Generator[Message, Any, list[Node]]:
        """Those of these nodes on which there is a majority, with their scores."""
        texts = [node.text for node in nodes]
        for _ in range(self.tries):
            if not texts:
                break
            questions = [judging(search.prompt, text) for text in texts]
            copies = [self.votes] * len(texts)
            said = yield from answers(
                ctx, search.speaker, questions, copies, Sampling(temperature=self.t),
                self.critique, self.inner, refinement.SETTLED.search, search.behind,
            )  # fmt: skip
            note(ctx, "judgements", sum(copies))
            for text, judgements in zip(texts, said, strict=True):
                search.judged[text] = tally(judgements)
            texts = [text for text in texts if search.judged[text] is None]
        kept = []
        for node in nodes:
            found = search.judged[node.text]
            if found is not None:
                node.score, node.critique = found
                kept.append(node)
        return kept

    def refine(
        self, ctx: Context, search: Search, level: Sequence[Node]
    ) -> Generator[Message, Any, list[Node]]:
        """New answers, whose texts were not there before."""
        lacking = [self.branch] * len(level)
        sampling = Sampling(temperature=self.t, stop=("[[end]]",))
        fresh: list[Node] = []
        for _ in range(self.tries):
            places = [place for place, number in enumerate(lacking) if number]
            if not places:
                break
            shown = [level[place] for place in places]
            questions = [refining(search.prompt, one.text, one.critique) for one in shown]
            copies = [lacking[place] for place in places]
            said = yield from answers(
                ctx, search.speaker, questions, copies, sampling, self.refined, self.inner
            )
            note(ctx, "refinements", sum(copies))
            for place, texts in zip(places, said, strict=True):
                for text in texts:
                    tokens = self.tokens(ctx, search, refined(text))
                    if not tokens:
                        continue
                    lacking[place] -= 1
                    (branch,) = yield Fork(search.blank)
                    yield Commit(tokens, torch.empty(0), branch)
                    node = node_of(ctx, branch)
                    if node.text in {*search.judged, *(other.text for other in fresh)}:
                        yield Drop(branch)
                    else:
                        fresh.append(node)
        return fresh

    def tokens(self, ctx: Context, search: Search, text: str) -> list[int]:
        """Of a refined answer and its end; none where it is empty, or not of the request's form."""
        tokens = search.speaker.words.encode(text.encode("utf-8", "replace"))
        blank = ctx.branches[search.blank]
        guide = blank.sampler.guide
        if guide is not None:
            fits = len(blank.tokens) + len(tokens) <= blank.limit
            return tokens if fits and guide.tracker.whole(tokens) else []
        ends = [token for token in ctx.engine.eos if token in blank.sampler.stops]
        return [*tokens, *ends[:1]] if tokens else []


def node_of(ctx: Context, branch: int) -> Node:
    decode = ctx.request.text
    assert decode is not None, "refused before by `needs_text`"
    return Node(branch, decode(list(ctx.branches[branch].output)))
