"""Questions that a request asks a model beside its text: those of judges and critics.

Each is a quiet branch with a prompt of its own, by the model's chat template where it has one, and
with a way of drawing tokens of its own. What is judged may say anything: only the template's own
special tokens become special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.distribution import Sampler
from foretell.core.tokenizer_bytes import Words, continuation, words_of
from foretell.core.tree import TokenTree
from foretell.core.types import (
    Ask,
    Commit,
    Drop,
    Fork,
    Message,
    Open,
    Reply,
    Sampling,
    Steps,
    Together,
)
from foretell.errors import PromptTooLong, Unsupported, first_line
from foretell.speculation.strategy import Speculative

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.drafter import Drafter
    from foretell.core.model import Model

Turn = tuple[str, str]  # whose it is (system, user or assistant), and what is said
LEAST = 64  # tokens that an answer must have room for
WINDOW = 8  # tokens before a text that it is divided into tokens with
TAIL = 32  # last tokens of an answer by which it is known to be over
HELD = re.compile("\ue000(\\d+)\ue001")  # stands for what is said while a template is filled in


@dataclass(frozen=True)
class Speaker:
    """A model that can be asked. `ends`: tokens that end what it says."""

    method: str  # that asks it, for errors
    name: str
    model: Model
    tokenizer: Any
    words: Words
    ends: tuple[int, ...]

    @staticmethod
    def of(ctx: Context, method: str, name: str = "target") -> Speaker:
        """The request's model of this name. Raises Unsupported where it cannot be asked."""
        target = ctx.models["target"]
        model = ctx.models.get(name)
        if model is None:
            raise Unsupported.without(method, target.name, name)
        beside = [given for given in ("source", "pictures") if given in ctx.request.inputs]
        if beside or {"source", "blocks"} & model.caps:
            raise Unsupported.missing(
                method,
                model.name,
                "prompts of text alone, which the model goes on with from left to right",
                "take another method or model",
            )
        # A model without a tokenizer of its own has the target's.
        own = target if model.tokenizer is None else model
        words = words_of(own, method)
        ends = () if words.end is None else (words.end,)
        if own is target:
            ends = (*ends, *ctx.engine.eos)
        return Speaker(method, name, model, own.tokenizer, words, tuple(dict.fromkeys(ends)))

    def check_writes(self, text: str) -> None:
        """Raises Unsupported where its tokens cannot write a text."""
        if self.words.text(self.words.encode(text.encode())) != text.encode():
            raise Unsupported.missing(
                self.method,
                self.model.name,
                "a tokenizer that can write any text",
                "load the model from a folder that has one",
            )

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say, without special ones."""
        return self.words.text(tokens).decode("utf-8", "replace")

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """The tokens of a conversation that the model is to go on with. Raises Unsupported."""
        held = [(role, f"\ue000{place}\ue001") for place, (role, _) in enumerate(turns)]
        if getattr(self.tokenizer, "chat_template", None):
            tokens: list[int] = []
            form = self._form(held)
        else:
            tokens = list(self.words.start)
            form = "".join(f"{mark}\n\n" for _, mark in held)
        names = sorted(self.words.specials, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", form) if names else [form]
        for part in filter(None, parts):
            if part in self.words.specials:
                tokens.append(self.words.specials[part])
            else:
                said = HELD.sub(lambda mark: turns[int(mark[1])][1], part)
                tokens += self.words.encode(said.encode("utf-8", "replace"))
        return tokens

    def _form(self, held: Sequence[Turn]) -> str:
        """The template, filled in. One that takes no system's turn finds it before the user's."""
        forms = [held]
        if held[0][0] == "system" and len(held) > 1:
            forms.append([(held[1][0], f"{held[0][1]}\n\n{held[1][1]}"), *held[2:]])
        reason = ""
        for turns in forms:
            messages = [{"role": role, "content": mark} for role, mark in turns]
            try:
                form: str = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # a template is a program, and may refuse with any error
                reason = reason or first_line(error)
            else:
                return form
        raise Unsupported.missing(
            self.method,
            self.model.name,
            f"a chat template that takes its questions, and it says: {reason}",
            "take another model",
        )


def opened(
    ctx: Context,
    speaker: Speaker,
    prompts: Sequence[Sequence[int]],
    copies: Sequence[int],
    sampling: Sampling,
    most: int,
    behind: Callable[[int], int] = lambda room: 0,
) -> Generator[Message, Any, list[list[int]]]:
    """Quiet branches for answers of at most `most` tokens: of each prompt so many copies, which
    share its rows. `behind`: tokens to leave free behind an answer, of so many behind the prompt.

    Raises PromptTooLong.
    """
    firsts = []
    for prompt in prompts:
        room = speaker.model.context - len(prompt)
        room -= behind(room)
        if room < min(LEAST, most):
            raise PromptTooLong(
                f"{speaker.method}: its question has {len(prompt)} tokens, which leaves too little "
                f"of what {speaker.model.name} holds ({speaker.model.context}); shorten the "
                "prompt, or lower max_new_tokens"
            )
        first = yield Open(prompt, speaker.name)
        vocab = speaker.model.vocab
        own = ctx.branches[first]
        own.sampler = Sampler(sampling, prompt, speaker.ends, vocab, speaker.text)
        own.limit = len(prompt) + min(most, room)
        firsts.append(first)
    shared = [pair for pair in zip(firsts, prompts, copies, strict=True) if pair[2] > 1]
    if shared:
        yield [Ask(TokenTree(text[-1]), speaker.name, one, rows=()) for one, text, _ in shared]
    groups = []
    for first, count in zip(firsts, copies, strict=True):
        twins = (yield Fork(first, count - 1, quiet=True)) if count > 1 else []
        groups.append([first, *twins])
    return groups


def written(
    ctx: Context,
    speaker: Speaker,
    drafter: Drafter | None = None,
    over: Callable[[str], object] | None = None,
) -> Steps:
    """Writes the answer on the quiet branch of `ctx`: to an end, a stop or its limit, or until its
    last words are `over`. An end itself may be left out.
    """
    branch = ctx.branches[ctx.branch]
    steps = one_by_one(ctx, speaker) if drafter is None else Speculative(drafter).run(ctx)
    answer: Any = None
    try:
        while len(branch.tokens) < branch.limit:
            try:
                message = steps.send(answer)
            except StopIteration:
                return
            answer = yield message
            if isinstance(message, Commit) and message.branch == ctx.branch:
                if branch.sampler.ended(branch.output):
                    return
                if over is not None and over(speaker.text(branch.output[-TAIL:])):
                    return
    finally:
        steps.close()


def one_by_one(ctx: Context, speaker: Speaker) -> Generator[Message, Any, None]:
    """Draws tokens up to an end, which it does not write."""
    while True:
        reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), speaker.name, ctx.branch)
        law = ctx.sampler.law(reply.logits[0], ctx.output)
        token = ctx.rng.sample(law, "target", len(ctx.output))
        if token in ctx.sampler.stops:
            return
        yield Commit([token], torch.empty(0), ctx.branch)


def chosen(ctx: Context, speaker: Speaker, options: Sequence[str]) -> Generator[Message, Any, int]:
    """Writes one of these texts, of which none begins another; returns its number.

    Its tokens are drawn from the model's law over those that go on with one of them. Where all go
    on with the same token there is nothing to ask.
    """
    ways = [continuation(speaker.words, ctx.tokens, one.encode(), WINDOW) for one in options]
    left = list(range(len(options)))
    place = 0
    while len(left) > 1:
        following = sorted({ways[number][place] for number in left})
        token = following[0]
        if len(following) > 1:
            reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), speaker.name, ctx.branch)
            row = torch.full_like(reply.logits[0], -torch.inf)
            row[following] = reply.logits[0][following]
            law = ctx.sampler.law(row, ctx.output)
            token = ctx.rng.sample(law, "target", len(ctx.output))
        yield Commit([token], torch.empty(0), ctx.branch)
        left = [number for number in left if ways[number][place] == token]
        place += 1
    if rest := ways[left[0]][place:]:
        yield Commit(rest, torch.empty(0), ctx.branch)
    return left[0]


def answers(
    ctx: Context,
    speaker: Speaker,
    questions: Sequence[Sequence[Turn]],
    copies: Sequence[int],
    sampling: Sampling,
    most: int,
    drafter: Drafter | None = None,
    over: Callable[[str], object] | None = None,
    behind: Callable[[int], int] = lambda room: 0,
) -> Generator[Message, Any, list[list[str]]]:
    """So many answers to each question, written side by side: see `opened` and `written`."""
    prompts = [speaker.prompt(turns) for turns in questions]
    groups = yield from opened(ctx, speaker, prompts, copies, sampling, most, behind)
    branches = [branch for group in groups for branch in group]
    yield Together([written(ctx.on(one), speaker, drafter, over) for one in branches])
    texts = [[speaker.text(ctx.branches[one].output) for one in group] for group in groups]
    for branch in branches:
        yield Drop(branch)
    return texts


def note(ctx: Context, name: str, number: int) -> None:
    """Counts questions in the request's statistics."""
    ctx.stats.notes[name] = ctx.stats.notes.get(name, 0) + number
