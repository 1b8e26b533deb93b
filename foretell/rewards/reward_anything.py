"""A model judges texts by a principle that is given in words.

It reads the principle, the prompt and all texts that are compared, under the names model-1, model-2
and so on, thinks for a while, and then gives each text 1 to 5 points and orders all of them from
best to worst, as JSON. The form of the JSON is written for it, and it is asked only where there is
something to choose: points, and which of texts with equal points comes next. So every verdict can
be read, its order agrees with its points, and it costs few forwards. The texts are shuffled, and
judged again in the opposite order, since judges prefer what stands in certain places; the mean of
both is the reward, from 0 to 1. Statistics count the `judgements` among their notes.

Paper: Yu et al., RewardAnything: Generalizable Principle-Following Reward Models, arXiv:2506.03637
Guarantee: lossy: a text that is chosen by it has another distribution than a sample
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
from typing import TYPE_CHECKING, Annotated, Any

from foretell.core.settings import Range
from foretell.core.text import Written
from foretell.core.types import Drop, Message, Open, Sampling, Together
from foretell.errors import BadConfig
from foretell.rewards.base import Reward
from foretell.rewards.questions import (
    Speaker,
    Turn,
    choose_option,
    count_questions,
    open_branches,
    write_answer,
)

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
    """The principle and the judge; with orders=0 all texts are worth the same."""

    principle: Written = ""  # in plain words; a spec may name a file, principle=@FILE
    model: str = ""  # name of the judge; "": the target
    # in which the texts are judged, every second one backwards
    orders: Annotated[int, Range(0, 8)] = 2
    think: Annotated[int, Range(0, 1 << 16)] = 4096  # tokens of thoughts, at most
    t: Annotated[float, Range(0, 100)] = 0.1  # temperature of thoughts and choices
    p: Annotated[float, Range(1e-06, 1)] = 0.9  # top-p of them

    partial = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.principle.strip():
            raise BadConfig(
                "reward-anything: needs a principle; give one, as in "
                "reward-anything:principle=Be brief."
            )

    def check(self, ctx: Context) -> None:
        """Raises Unsupported where the judge is not there, or cannot write a verdict."""
        if self.orders:
            self.find_judge(ctx).check_writes(f"{TOLD} 67890")

    def find_judge(self, ctx: Context) -> Speaker:
        return Speaker.find_speaker(ctx, "reward-anything", self.model or "target")

    def build_turns(self, prompt: str, texts: Sequence[str]) -> list[Turn]:
        """Returns the judge's instruction, and what it is to judge."""
        named_responses = {text_name(text_index): text for text_index, text in enumerate(texts)}
        judged_content = {
            "principle": self.principle,
            "prompt": prompt,
            "responses": named_responses,
        }
        instruction = TOLD.format(thoughts=THOUGHTS if self.think else "")
        return [
            ("system", instruction),
            ("user", json.dumps(judged_content, ensure_ascii=False, indent=1)),
        ]

    def steps(
        self, ctx: Context, prompt: str, texts: Sequence[str]
    ) -> Generator[Message, Any, list[float]]:
        distinct_texts = list(dict.fromkeys(texts))
        if not self.orders or not distinct_texts:
            return [0.0] * len(texts)
        judge = self.find_judge(ctx)
        text_orders = yield from self.shuffle_orders(ctx, len(distinct_texts))
        prompts = [
            judge.prompt(self.build_turns(prompt, [distinct_texts[number] for number in order]))
            for order in text_orders
        ]
        verdict_length = len(judge.words.encode(longest_verdict(len(distinct_texts)).encode())) + 16
        max_tokens = self.think and self.think + len(judge.words.encode(BEGIN.encode()))
        sampling = Sampling(temperature=self.t, top_p=self.p)
        copies = [1] * len(prompts)
        branch_groups = yield from open_branches(
            ctx, judge, prompts, copies, sampling, max_tokens, lambda room: verdict_length
        )
        branches = [branch for (branch,) in branch_groups]
        text_count = len(distinct_texts)
        verdicts = yield Together(
            [
                self.write_verdict(ctx.on(judge_branch), judge, text_count)
                for judge_branch in branches
            ]
        )
        for branch in branches:
            yield Drop(branch)
        count_questions(ctx, "judgements", len(text_orders))
        text_points = dict.fromkeys(distinct_texts, 0.0)
        for order, verdict in zip(text_orders, verdicts, strict=True):
            for number, value in zip(order, verdict, strict=True):
                text_points[distinct_texts[number]] += value / len(text_orders)
        return [(text_points[text] - 1) / (MOST - 1 + TIE) for text in texts]

    def shuffle_orders(self, ctx: Context, count: int) -> Generator[Message, Any, list[list[int]]]:
        """Draws the orders of so many texts. The draws are those of a branch that is opened for
        them: a request may have many texts judged, and no draw serves twice.
        """
        drawing_branch = yield Open(ctx.tokens[-1:])
        text_orders: list[list[int]] = []
        for draw_number in range(0, self.orders, 2):
            shuffled_order: list[int] = (
                ctx.on(drawing_branch).rng.gumbel(count, 0, draw_number).argsort().tolist()
            )
            text_orders += [shuffled_order, shuffled_order[::-1]]
        yield Drop(drawing_branch)
        return text_orders[: self.orders]

    def write_verdict(
        self, ctx: Context, judge: Speaker, count: int
    ) -> Generator[Message, Any, list[float]]:
        """Thinks on its branch, and writes a verdict; returns the points of each text, in which a
        position in the order counts for a part of TIE.
        """
        next_text = ""
        if self.think:
            yield from choose_option(ctx, judge, [BEGIN])
            yield from write_answer(ctx, judge, is_over=lambda last_words: END in last_words)
            if END not in judge.text(ctx.output):
                next_text = f"\n{END}"
            next_text += "\n"
        next_text += '{"scores": {'
        text_points = []
        for text_index in range(count):
            option_texts = [
                f'{next_text}"{text_name(text_index)}": {value}' for value in range(1, MOST + 1)
            ]
            text_points.append(1 + (yield from choose_option(ctx, judge, option_texts)))
            next_text = ", "
        next_text = '}, "best-to-worst": ['
        remaining_texts = list(range(count))
        text_values = [0.0] * count
        while remaining_texts:
            best_texts = [
                text_index
                for text_index in remaining_texts
                if text_points[text_index]
                == max(text_points[other_index] for other_index in remaining_texts)
            ]
            option_texts = [f'{next_text}"{text_name(text_index)}"' for text_index in best_texts]
            text_index = best_texts[(yield from choose_option(ctx, judge, option_texts))]
            text_values[text_index] = text_points[text_index] + TIE * (
                len(remaining_texts) - 1
            ) / max(1, count - 1)
            remaining_texts.remove(text_index)
            next_text = ", "
        return text_values


def text_name(text_index: int) -> str:
    """Returns the name of a text, as the judge sees it."""
    return f"model-{text_index + 1}"


def longest_verdict(count: int) -> str:
    """Returns a verdict over so many texts, with thoughts that end before it."""
    top_scores = {text_name(text_index): MOST for text_index in range(count)}
    return f"{BEGIN}\n{END}\n" + json.dumps(
        {"scores": top_scores, "best-to-worst": list(top_scores)}
    )
