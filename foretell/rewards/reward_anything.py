"""A model judges texts by a principle that is given in words.

It reads the principle, the prompt and all texts that are compared, under the names model-1, model-2
and so on, thinks for a while, and then gives each text 1 to 5 points and orders all of them from
best to worst, as JSON. The form of the JSON is written for it, and it is asked only where there is
something to choose: points, and which of texts with equal points comes next. So every verdict can
be read, its order agrees with its points, and it costs few forwards. The texts are shuffled, and
judged again in the opposite order, since judges prefer what stands in certain places; the mean of
both is the reward, from 0 to 1. Statistics count the `judgements` among their notes.

Paper: Yu et al., RewardAnything: Generalizable Principle-Following Reward Models, arXiv:2506.03637
Guarantee: lossy: a text that is chosen by it has another law than a sample
Cost: one judgement an order: its thoughts, and a forward for each of its choices
Needs: a principle; a model that can judge, which is the target itself unless another one is named
Trains: nothing
Try: --method best-of --reward "reward-anything:principle=Be brief."
Differs:
- the form is forced, where the released code repairs what the model wrote; the order has to agree
with the points
- two orders, one the other backwards, of the request's own draws; the released code shuffles once,
and sets the global generator for it
- points become (points - 1) / 4, and of equal points the order decides, by less than half a point
- equal texts are judged as one
- what the judge is told is said in other words
- the prompt is read as text: of a chat the names of its roles are in it
- the judge's text is its own model's: a drafter of the method does not speed it up
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.text import Written
from foretell.core.types import Drop, Message, Open, Sampling, Together
from foretell.errors import BadConfig
from foretell.rewards.base import Reward
from foretell.rewards.questions import Speaker, Turn, chosen, note, opened, written

if TYPE_CHECKING:
    from foretell.core.context import Context

MOST = 5  # points
TIE = 0.1  # points that the best of texts with equal ones has more than the worst
BEGIN, END = "<think>\n", "</think>"
THOUGHTS = "First think briefly, between <think> and </think>.\n"
TOLD = """You compare answers to one prompt by one principle.
The principle counts for more than anything else you like in an answer. Only never reward harm: an
answer that does any is a bad one, whatever the principle says.
{thoughts}Give every answer whole points from 1 to 5, and use all of that range:
5: it follows the principle in every respect
4: it follows it well, with small faults
3: it does what is most needed
2: something important is missing
1: it goes against the principle
Then order all answers from best to worst, also those with equal points.
Write your verdict as JSON and nothing else, in this form:
{{"scores": {{"model-1": 2, "model-2": 4}}, "best-to-worst": ["model-2", "model-1"]}}"""


@dataclass(frozen=True)
class RewardAnything(Reward):
    """With orders=0 all texts are worth the same."""

    principle: Written = ""  # in plain words; a spec may name a file, principle=@FILE
    model: str = ""  # name of the judge; "": the target
    orders: int = 2  # in which the texts are judged, every second one backwards
    think: int = 4096  # tokens of thoughts, at most
    t: float = 0.1  # temperature of thoughts and choices
    p: float = 0.9  # top-p of them

    partial = False

    def __post_init__(self) -> None:
        if not self.principle.strip():
            raise BadConfig(
                "reward-anything: needs a principle; give one, as in "
                "reward-anything:principle=Be brief."
            )
        for name, most in (("orders", 8), ("think", 1 << 16)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise BadConfig.field(f"reward-anything:{name}", value, f"between 0 and {most}")
        if not 0 <= self.t <= 100:
            raise BadConfig.field("reward-anything:t", self.t, "between 0 and 100")
        if not 1e-6 <= self.p <= 1:
            raise BadConfig.field("reward-anything:p", self.p, "between 0.000001 and 1")

    def check(self, ctx: Context) -> None:
        """Raises Unsupported where the judge is not there, or cannot write a verdict."""
        if self.orders:
            self.judge(ctx).check_writes(f"{TOLD} 67890")

    def judge(self, ctx: Context) -> Speaker:
        return Speaker.of(ctx, "reward-anything", self.model or "target")

    def turns(self, prompt: str, texts: Sequence[str]) -> list[Turn]:
        """What the judge is told, and what it is to judge."""
        shown = {name(place): text for place, text in enumerate(texts)}
        asked = {"principle": self.principle, "prompt": prompt, "responses": shown}
        told = TOLD.format(thoughts=THOUGHTS if self.think else "")
        return [("system", told), ("user", json.dumps(asked, ensure_ascii=False, indent=1))]

    def steps(
        self, ctx: Context, prompt: str, texts: Sequence[str]
    ) -> Generator[Message, Any, list[float]]:
        different = list(dict.fromkeys(texts))
        if not self.orders or not different:
            return [0.0] * len(texts)
        judge = self.judge(ctx)
        orders = yield from self.shuffled(ctx, len(different))
        prompts = [
            judge.prompt(self.turns(prompt, [different[number] for number in order]))
            for order in orders
        ]
        form = len(judge.words.encode(longest(len(different)).encode())) + 16
        most = self.think and self.think + len(judge.words.encode(BEGIN.encode()))
        sampling = Sampling(temperature=self.t, top_p=self.p)
        copies = [1] * len(prompts)
        groups = yield from opened(ctx, judge, prompts, copies, sampling, most, lambda room: form)
        branches = [branch for (branch,) in groups]
        count = len(different)
        verdicts = yield Together([self.verdict(ctx.on(one), judge, count) for one in branches])
        for branch in branches:
            yield Drop(branch)
        note(ctx, "judgements", len(orders))
        points = dict.fromkeys(different, 0.0)
        for order, verdict in zip(orders, verdicts, strict=True):
            for number, value in zip(order, verdict, strict=True):
                points[different[number]] += value / len(orders)
        return [(points[text] - 1) / (MOST - 1 + TIE) for text in texts]

    def shuffled(self, ctx: Context, count: int) -> Generator[Message, Any, list[list[int]]]:
        """The orders of so many texts. Their draws are those of a branch that is opened for them:
        a request may have many texts judged, and no draw serves twice.
        """
        dealer = yield Open(ctx.tokens[-1:])
        found: list[list[int]] = []
        for turn in range(0, self.orders, 2):
            order: list[int] = ctx.on(dealer).rng.gumbel(count, 0, turn).argsort().tolist()
            found += [order, order[::-1]]
        yield Drop(dealer)
        return found[: self.orders]

    def verdict(
        self, ctx: Context, judge: Speaker, count: int
    ) -> Generator[Message, Any, list[float]]:
        """Thinks on its branch, and writes a verdict; returns the points of each text, in which a
        place in the order counts for a part of TIE.
        """
        text = ""
        if self.think:
            yield from chosen(ctx, judge, [BEGIN])
            yield from written(ctx, judge, over=lambda last: END in last)
            if END not in judge.text(ctx.output):
                text = f"\n{END}"
            text += "\n"
        text += '{"scores": {'
        points = []
        for place in range(count):
            options = [f'{text}"{name(place)}": {value}' for value in range(1, MOST + 1)]
            points.append(1 + (yield from chosen(ctx, judge, options)))
            text = ", "
        text = '}, "best-to-worst": ['
        left = list(range(count))
        values = [0.0] * count
        while left:
            best = [place for place in left if points[place] == max(points[one] for one in left)]
            options = [f'{text}"{name(place)}"' for place in best]
            place = best[(yield from chosen(ctx, judge, options))]
            values[place] = points[place] + TIE * (len(left) - 1) / max(1, count - 1)
            left.remove(place)
            text = ", "
        return values


def name(place: int) -> str:
    """Of the text in this place."""
    return f"model-{place + 1}"


def longest(count: int) -> str:
    """A verdict over so many texts, with thoughts that end before it."""
    scores = {name(place): MOST for place in range(count)}
    return f"{BEGIN}\n{END}\n" + json.dumps({"scores": scores, "best-to-worst": list(scores)})
