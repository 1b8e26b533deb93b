"""Conditional beam search: the likeliest text of those that are what they ought to be.

The likeliest of all texts is often empty, or goes round in circles. Here beams are ranked by ln
p(text) + weight * ln P(a | text), where P says how likely a text that begins so is to turn out with
the attribute a: a linear classifier on the target's states at the newest token (`attribute`), or a
reward from 0 to 1. It is of the text as it stands and never added up. Each beam is looked at with
its `shortlist` best tokens, all of which share a forward. Finished texts must also meet a condition
that can be checked (`least`, `grams`, `pattern`); beams that cannot meet it any more are dropped.
With exact=yes no beams are kept: a depth-first search finds the likeliest text of all that meet
the condition, however long that takes.

Paper: Yoshida, Goyal, Gimpel, MAP's not dead yet: Uncovering true language model modes by
conditioning away degeneracy, arXiv:2311.08817
Guarantee: lossy: it looks for a likely text with an attribute, where plain decoding takes the
likeliest token
Cost: target 1
Needs: with an attribute or a reward, trees, and for the first hidden states of the target
Trains: the classifier, if any, by `foretell train attribute`; the target stays as it is
Differs:
- no code was released; widths, shortlist and the form of the classifier are ours
- a text's end counts with the same P, and besides must meet the condition
- a reward may say 0 of a text that only begins (no keyword stands in it yet); P is then `floor`
- the condition is by default that a text is not empty and has no 4-gram of tokens twice
- nothing is drafted: a beam's next tokens depend on the other beams after every step
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.refusals import refuse_policy
from foretell.core.settings import Range
from foretell.core.spending import REASON, Spent
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Finish, Message, Reply, Steps
from foretell.errors import BadConfig, RequestFailed
from foretell.rewards.base import Reward, needs_partial, needs_text, score_outputs
from foretell.strategies.log_probs import log_probs
from foretell.strategies.search.beam_search import (
    Beams,
    Branches,
    move_branches,
    refuse_for_search,
    search_beams,
)
from foretell.strategies.search.beams import Beam, Ended, Group
from foretell.strategies.search.conditions import (
    Condition,
    Text,
    find_mode,
    make_reason_finder,
    meets_condition,
)
from foretell.strategies.state_likeness import last_tap
from foretell.verification.judge_model import LinearJudge, classifier_of, states_at_nodes


@dataclass(frozen=True)
class ConditionalBeam(Beams):
    """Conditional beam search; with weight=0, least=0 and grams=0 it is beam search."""

    width: Annotated[int, Range(1, 256)] = 5  # beams
    shortlist: Annotated[int, Range(1, 4096)] = 20  # tokens that each beam is looked at with
    weight: Annotated[float, Range(0, 1_000_000)] = 1.0  # of ln P beside ln p
    # power of the length that scores are divided by
    penalty: Annotated[float, Range(-10, 10)] = 0.0
    attribute: str = ""  # file of a classifier of the target's states
    reward: Reward | None = None  # P by a reward instead
    floor: Annotated[float, Range(1e-30, 1)] = 0.001  # P where the reward is less
    least: int = 1  # tokens of a text before its end at least, 1: it is not empty
    grams: int = 4  # size of an n-gram that does not stand twice in a text; 0: may
    pattern: str = ""  # regular expression that matches the whole text
    exact: bool = False  # whether it searches depth first, by the condition alone

    draws = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.condition.check("conditional-beam")
        if self.attribute and self.reward is not None:
            raise BadConfig("conditional-beam: attribute and reward both say P; leave one out")
        if self.exact and (self.is_judged or self.penalty):
            raise BadConfig(
                "conditional-beam: exact=yes finds the likeliest text that meets the condition; "
                "leave attribute, reward and penalty out"
            )

    @property
    def condition(self) -> Condition:
        return Condition(self.least, self.grams, self.pattern)

    @property
    def is_judged(self) -> bool:
        """Whether texts are ranked by more than their probability."""
        return bool(self.weight and (self.attribute or self.reward is not None))

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        if not (self.is_judged or self.exact):
            return ()
        return ("tree", "taps") if self.is_judged and self.attribute else ("tree",)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, BadFile or Unsupported, before anything runs, for what it cannot do."""
        refuse_for_search("conditional-beam", ctx)
        if self.pattern or (self.is_judged and self.reward is not None):
            needs_text("conditional-beam", ctx, self.reward)
            needs_partial("conditional-beam", self.reward)
        if self.needs:
            refuse_policy("conditional-beam", ctx.request)
        if self.exact:
            return self._search_exactly(ctx)
        if not (self.is_judged or self.condition):
            return search_beams(ctx, [Group(self.width, self.penalty)], 0.0)
        judge = None
        if self.is_judged and self.attribute:
            load_classifier = partial(classifier_of, ctx.models["target"], self.attribute)
            judge = ctx.shared(load_classifier, "attribute")
        return self._search_beams(ctx, judge)

    def _search_exactly(self, ctx: Context) -> Steps:
        mode_text = yield from find_mode(ctx, self.condition)
        yield from commit_texts(ctx, [] if mode_text is None else [mode_text])

    def _search_beams(self, ctx: Context, judge: LinearJudge | None) -> Steps:
        group = Group(self.width, self.penalty)
        ended_texts = group.ended_beams
        try:
            yield from self.grow_beams(ctx, group, judge)
        except Spent:
            living = [beam for beam in group.living_beams if beam.tokens]
            ended_texts = ended_texts or [Ended(beam, beam.score, REASON) for beam in living]
            if not ended_texts:
                raise
        scored_texts = [(text.beam.tokens, text.score, text.reason) for text in ended_texts]
        yield from commit_texts(ctx, scored_texts)

    def grow_beams(
        self, ctx: Context, group: Group, judge: LinearJudge | None
    ) -> Generator[Message, Any, None]:
        """Runs the group of beams to its end."""
        reason_for = make_reason_finder(ctx)
        candidate_count = max(2, 1 + len(ctx.sampler.stops)) * self.width
        reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), branch=ctx.branch)
        branches: Branches = {group.living_beams[0]: ctx.branch}
        rows: dict[Text, torch.Tensor] = {(): reply.logits[0]}
        while True:
            beams = group.living_beams
            beam_logs = {beam: log_probs(ctx, rows[beam.tokens], beam.tokens) for beam in beams}
            texts: list[Text] = []
            for beam in beams:
                texts += self.list_continuations(ctx, beam, beam_logs[beam])
            text_values = [0.0] * len(texts)
            if self.is_judged and texts:
                text_values, rows = yield from self.judge_texts(ctx, judge, branches, texts)
            impossible = [torch.full_like(beam_logs[beam], math.inf) for beam in beams]
            token_costs = torch.stack(impossible)
            beam_indices = {beam.tokens: index for index, beam in enumerate(beams)}
            for text, text_value in zip(texts, text_values, strict=True):
                index = beam_indices[text[:-1]]
                beam = beams[index]  # whose own P is not counted again
                token_costs[index, text[-1]] = beam.score - beam.logprob - text_value
            pairs = group.advance(beam_logs, candidate_count, reason_for, token_costs)
            branches = yield from move_branches(ctx, branches, [] if group.is_over else pairs)
            if not branches:
                break
            if not self.is_judged:
                asks = [Ask(TokenTree(beam.tokens[-1]), branch=branches[beam]) for beam in branches]
                replies: list[Reply] = yield asks
                beam_replies = zip(branches, replies, strict=True)
                rows = {beam.tokens: reply.logits[0] for beam, reply in beam_replies}

    def list_continuations(self, ctx: Context, beam: Beam, logs: torch.Tensor) -> list[Text]:
        """A beam's likeliest continuations by a token, of those that may meet the condition."""
        best_log_probs, tokens = logs.topk(min(self.shortlist, len(logs)))
        reason_for, condition, allowed_texts = make_reason_finder(ctx), self.condition, []
        for log_prob, token in zip(best_log_probs.tolist(), tokens.tolist(), strict=True):
            text = (*beam.tokens, token)
            if log_prob == -math.inf:
                continue
            has_ended = reason_for(text) is not None
            if meets_condition(ctx, condition, text) if has_ended else condition.stays_open(text):
                allowed_texts.append(text)
        return allowed_texts

    def judge_texts(
        self, ctx: Context, judge: LinearJudge | None, branches: Branches, texts: Sequence[Text]
    ) -> Generator[Message, Any, tuple[list[float], dict[Text, torch.Tensor]]]:
        """Returns weight * ln P of each text, a beam and one token more; and the rows after."""
        taps = () if judge is None else (last_tap(ctx.models["target"]),)
        asks, asked_groups = [], []
        for beam, branch in branches.items():
            tree = TokenTree(ctx.on(branch).tokens[-1])
            beam_texts = [text for text in texts if text[:-1] == beam.tokens]
            nodes = [tree.add(0, text[-1]) for text in beam_texts]
            if beam_texts:
                asks.append(Ask(tree, branch=branch, rows=nodes, taps=taps))
                asked_groups.append((beam_texts, nodes))
        replies: list[Reply] = yield asks
        rows_by_text: dict[Text, torch.Tensor] = {}
        log_chances: dict[Text, float] = {}
        for (beam_texts, nodes), reply in zip(asked_groups, replies, strict=True):
            rows_by_text.update(zip(beam_texts, reply.logits, strict=True))
            if judge is not None:
                chances = judge.log_chances(states_at_nodes(reply, nodes))
                log_chances.update(zip(beam_texts, chances, strict=True))
        if self.reward is not None:
            rewards = yield from score_outputs(ctx, self.reward, texts)
            if any(not (0 <= reward <= 1 or reward == -math.inf) for reward in rewards):
                raise BadConfig("conditional-beam: needs a reward that gives numbers from 0 to 1")
            log_chances = dict(zip(texts, map(self.log_reward, rewards), strict=True))
        return [self.weight * log_chances[text] for text in texts], rows_by_text

    def log_reward(self, reward: float) -> float:
        """ln P by a reward; -inf where there is none."""
        return reward if reward == -math.inf else math.log(max(reward, self.floor))


def commit_texts(ctx: Context, scored_texts: Sequence[tuple[Text, float, str]]) -> Steps:
    """Commits the first text, and tells of all. Raises RequestFailed where there is none."""
    if not scored_texts:
        raise RequestFailed(
            "conditional-beam: none of the texts it found meets the condition; loosen least, grams "
            "or pattern, raise width or max_new_tokens, or take exact=yes"
        )
    answers = [(list(text), score, reason) for text, score, reason in scored_texts]
    tokens, _, reason = answers[0]
    yield Commit(tokens, torch.empty(0), ctx.branch, ["target"] * len(tokens))
    yield Finish(ctx.branch, reason, answers)
