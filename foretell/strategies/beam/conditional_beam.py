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
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.refusals import refuse_policy
from foretell.core.spending import REASON, Spent
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Finish, Message, Reply, Steps
from foretell.errors import BadConfig, RequestFailed
from foretell.rewards.base import Reward, needs_partial, needs_text, scored
from foretell.strategies.beam.beam_search import Beams, Branches, moved, refuse, search
from foretell.strategies.beam.beams import Beam, Ended, Group
from foretell.strategies.beam.conditions import Condition, Text, met, mode, reason_of
from foretell.strategies.log_probs import log_probs
from foretell.strategies.state_likeness import last_tap
from foretell.verification.judge_model import LinearJudge, classifier_of, states_of


@dataclass(frozen=True)
class ConditionalBeam(Beams):
    """With weight=0, least=0 and grams=0 it is beam search, with width=1 then greedy decoding."""

    width: int = 5  # beams
    shortlist: int = 20  # tokens that each beam is looked at with
    weight: float = 1.0  # of ln P beside ln p
    penalty: float = 0.0  # power of the length that scores are divided by
    attribute: str = ""  # file of a classifier of the target's states
    reward: Reward | None = None  # P by a reward instead
    floor: float = 0.001  # P where the reward is less
    least: int = 1  # tokens of a text before its end at least, 1: it is not empty
    grams: int = 4  # size of an n-gram that does not stand twice in a text; 0: may
    pattern: str = ""  # regular expression that matches the whole text
    exact: bool = False  # whether it searches depth first, by the condition alone

    draws = False

    def __post_init__(self) -> None:
        ranges = {"width": (1, 256), "shortlist": (1, 4096), "penalty": (-10, 10)}
        for name, (low, high) in {**ranges, "weight": (0, 1e6), "floor": (1e-30, 1)}.items():
            value = getattr(self, name)
            if not low <= value <= high:
                what = f"between {low} and {high:g}"
                raise BadConfig.field(f"conditional-beam:{name}", value, what)
        self.condition.check("conditional-beam")
        if self.attribute and self.reward is not None:
            raise BadConfig("conditional-beam: attribute and reward both say P; leave one out")
        if self.exact and (self.judged or self.penalty):
            raise BadConfig(
                "conditional-beam: exact=yes finds the likeliest text that meets the condition; "
                "leave attribute, reward and penalty out"
            )

    @property
    def condition(self) -> Condition:
        return Condition(self.least, self.grams, self.pattern)

    @property
    def judged(self) -> bool:
        """Whether texts are ranked by more than their probability."""
        return bool(self.weight and (self.attribute or self.reward is not None))

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        if not (self.judged or self.exact):
            return ()
        return ("tree", "taps") if self.judged and self.attribute else ("tree",)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, BadFile or Unsupported, before anything runs, for what it cannot do."""
        refuse("conditional-beam", ctx)
        if self.pattern or (self.judged and self.reward is not None):
            needs_text("conditional-beam", ctx, self.reward)
            needs_partial("conditional-beam", self.reward)
        if self.needs:
            refuse_policy("conditional-beam", ctx.request)
        if self.exact:
            return self._exact(ctx)
        if not (self.judged or self.condition):
            return search(ctx, [Group(self.width, self.penalty)], 0.0)
        judge = None
        if self.judged and self.attribute:
            make = partial(classifier_of, ctx.models["target"], self.attribute)
            judge = ctx.shared(make, "attribute")
        return self._search(ctx, judge)

    def _exact(self, ctx: Context) -> Steps:
        found = yield from mode(ctx, self.condition)
        yield from told(ctx, [] if found is None else [found])

    def _search(self, ctx: Context, judge: LinearJudge | None) -> Steps:
        group = Group(self.width, self.penalty)
        texts = group.ended
        try:
            yield from self.grown(ctx, group, judge)
        except Spent:
            living = [Ended(beam, beam.score, REASON) for beam in group.alive if beam.tokens]
            texts = texts or living
            if not texts:
                raise
        yield from told(ctx, [(end.beam.tokens, end.score, end.reason) for end in texts])

    def grown(
        self, ctx: Context, group: Group, judge: LinearJudge | None
    ) -> Generator[Message, Any, None]:
        """Runs the group of beams to its end."""
        why = reason_of(ctx)
        wide = max(2, 1 + len(ctx.sampler.stops)) * self.width
        reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), branch=ctx.branch)
        branches: Branches = {group.alive[0]: ctx.branch}
        rows: dict[Text, torch.Tensor] = {(): reply.logits[0]}
        while True:
            laws = {beam: log_probs(ctx, rows[beam.tokens], beam.tokens) for beam in group.alive}
            texts = [text for beam in group.alive for text in self.looked_at(ctx, beam, laws[beam])]
            values = [0.0] * len(texts)
            if self.judged and texts:
                values, rows = yield from self.judgement(ctx, judge, branches, texts)
            taken = torch.stack([torch.full_like(laws[beam], math.inf) for beam in group.alive])
            place = {beam.tokens: number for number, beam in enumerate(group.alive)}
            for text, value in zip(texts, values, strict=True):
                beam = group.alive[place[text[:-1]]]  # whose own P is not counted again
                taken[place[beam.tokens], text[-1]] = beam.score - beam.logprob - value
            going = group.advance(laws, wide, why, taken)
            branches = yield from moved(ctx, branches, [] if group.over else going)
            if not branches:
                break
            if not self.judged:
                asks = [Ask(TokenTree(beam.tokens[-1]), branch=branches[beam]) for beam in branches]
                replies: list[Reply] = yield asks
                pairs = zip(branches, replies, strict=True)
                rows = {beam.tokens: reply.logits[0] for beam, reply in pairs}

    def looked_at(self, ctx: Context, beam: Beam, law: torch.Tensor) -> list[Text]:
        """A beam's likeliest continuations by a token, of those that may meet the condition."""
        values, tokens = law.topk(min(self.shortlist, len(law)))
        why, condition, found = reason_of(ctx), self.condition, []
        for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
            text = (*beam.tokens, token)
            ended = value > -math.inf and why(text) is not None
            right = met(ctx, condition, text) if ended else condition.open(text)
            if value > -math.inf and right:
                found.append(text)
        return found

    def judgement(
        self, ctx: Context, judge: LinearJudge | None, branches: Branches, texts: Sequence[Text]
    ) -> Generator[Message, Any, tuple[list[float], dict[Text, torch.Tensor]]]:
        """Of each text, which is a beam and one token more, weight * ln P; and the rows behind."""
        taps = () if judge is None else (last_tap(ctx.models["target"]),)
        asks, order = [], []
        for beam, branch in branches.items():
            tree = TokenTree(ctx.on(branch).tokens[-1])
            own = [text for text in texts if text[:-1] == beam.tokens]
            nodes = [tree.add(0, text[-1]) for text in own]
            if own:
                asks.append(Ask(tree, branch=branch, rows=nodes, taps=taps))
                order.append((own, nodes))
        replies: list[Reply] = yield asks
        rows: dict[Text, torch.Tensor] = {}
        logs: dict[Text, float] = {}
        for (own, nodes), reply in zip(order, replies, strict=True):
            rows.update(zip(own, reply.logits, strict=True))
            if judge is not None:
                logs.update(zip(own, judge.log_chances(states_of(reply, nodes)), strict=True))
        if self.reward is not None:
            found = yield from scored(ctx, self.reward, texts)
            if any(not (0 <= value <= 1 or value == -math.inf) for value in found):
                raise BadConfig("conditional-beam: needs a reward that gives numbers from 0 to 1")
            logs = {text: self.log(value) for text, value in zip(texts, found, strict=True)}
        return [self.weight * logs[text] for text in texts], rows

    def log(self, reward: float) -> float:
        """ln P by a reward; -inf where there is none."""
        return reward if reward == -math.inf else math.log(max(reward, self.floor))


def told(ctx: Context, texts: Sequence[tuple[Text, float, str]]) -> Steps:
    """Commits the first text, and tells of all. Raises RequestFailed where there is none."""
    if not texts:
        raise RequestFailed(
            "conditional-beam: none of the texts it found meets the condition; loosen least, grams "
            "or pattern, raise width or max_new_tokens, or take exact=yes"
        )
    answers = [(list(text), score, reason) for text, score, reason in texts]
    tokens, _, reason = answers[0]
    yield Commit(tokens, torch.empty(0), ctx.branch, ["target"] * len(tokens))
    yield Finish(ctx.branch, reason, answers)
