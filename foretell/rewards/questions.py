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
from foretell.core.tokenizer_bytes import Words, continue_tokens, words_of
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
from foretell.errors import PromptTooLong, Unsupported, first_message_line
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
    def find_speaker(ctx: Context, method: str, name: str = "target") -> Speaker:
        """Returns the request's model of this name. Raises Unsupported where it cannot be asked."""
        target = ctx.models["target"]
        model = ctx.models.get(name)
        if model is None:
            raise Unsupported.missing_model(method, target.name, name)
        other_inputs = [
            input_name for input_name in ("source", "pictures") if input_name in ctx.request.inputs
        ]
        if other_inputs or {"source", "blocks"} & model.caps:
            raise Unsupported.missing_capability(
                method,
                model.name,
                "prompts of text alone, which the model goes on with from left to right",
                "take another method or model",
            )
        # A model without a tokenizer of its own has the target's.
        tokenizer_model = target if model.tokenizer is None else model
        token_words = words_of(tokenizer_model, method)
        end_tokens = () if token_words.end is None else (token_words.end,)
        if tokenizer_model is target:
            end_tokens = (*end_tokens, *ctx.engine.eos)
        return Speaker(
            method,
            name,
            model,
            tokenizer_model.tokenizer,
            token_words,
            tuple(dict.fromkeys(end_tokens)),
        )

    def check_writes(self, text: str) -> None:
        """Raises Unsupported where the model's tokens cannot write a text."""
        if self.words.text(self.words.encode(text.encode())) != text.encode():
            raise Unsupported.missing_capability(
                self.method,
                self.model.name,
                "a tokenizer that can write any text",
                "load the model from a folder that has one",
            )

    def text(self, tokens: Sequence[int]) -> str:
        """Decodes tokens, without special ones."""
        return self.words.text(tokens).decode("utf-8", "replace")

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Encodes a conversation that the model is to go on with. Raises Unsupported."""
        marked_turns = [
            (role, f"\ue000{turn_index}\ue001") for turn_index, (role, _) in enumerate(turns)
        ]
        if getattr(self.tokenizer, "chat_template", None):
            prompt_tokens: list[int] = []
            filled_template = self._fill_template(marked_turns)
        else:
            prompt_tokens = list(self.words.start)
            filled_template = "".join(f"{turn_mark}\n\n" for _, turn_mark in marked_turns)
        special_names = sorted(self.words.specials, key=len, reverse=True)
        template_parts = (
            re.split(f"({'|'.join(map(re.escape, special_names))})", filled_template)
            if special_names
            else [filled_template]
        )
        for template_part in filter(None, template_parts):
            if template_part in self.words.specials:
                prompt_tokens.append(self.words.specials[template_part])
            else:
                spoken_text = HELD.sub(lambda turn_mark: turns[int(turn_mark[1])][1], template_part)
                prompt_tokens += self.words.encode(spoken_text.encode("utf-8", "replace"))
        return prompt_tokens

    def _fill_template(self, marked_turns: Sequence[Turn]) -> str:
        """Fills in the template. One that takes no system's turn finds it before the user's."""
        turn_forms = [marked_turns]
        if marked_turns[0][0] == "system" and len(marked_turns) > 1:
            turn_forms.append(
                [
                    (marked_turns[1][0], f"{marked_turns[0][1]}\n\n{marked_turns[1][1]}"),
                    *marked_turns[2:],
                ]
            )
        refusal_reason = ""
        for turns in turn_forms:
            messages = [{"role": role, "content": turn_mark} for role, turn_mark in turns]
            try:
                filled_template: str = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # a template is a program, and may refuse with any error
                refusal_reason = refusal_reason or first_message_line(error)
            else:
                return filled_template
        raise Unsupported.missing_capability(
            self.method,
            self.model.name,
            f"a chat template that takes its questions, and it says: {refusal_reason}",
            "take another model",
        )


def open_branches(
    ctx: Context,
    speaker: Speaker,
    prompts: Sequence[Sequence[int]],
    copies: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    reserve_room: Callable[[int], int] = lambda room: 0,
) -> Generator[Message, Any, list[list[int]]]:
    """Opens quiet branches for answers of at most `max_tokens` tokens: of each prompt so many
    copies, which share its rows. `reserve_room`: tokens to leave free after an answer, of so many
    after the prompt.

    Raises PromptTooLong.
    """
    first_branches = []
    for prompt in prompts:
        remaining_room = speaker.model.context - len(prompt)
        remaining_room -= reserve_room(remaining_room)
        if remaining_room < min(LEAST, max_tokens):
            raise PromptTooLong(
                f"{speaker.method}: its question has {len(prompt)} tokens, which leaves too little "
                f"of what {speaker.model.name} holds ({speaker.model.context}); shorten the "
                "prompt, or lower max_new_tokens"
            )
        first_branch = yield Open(prompt, speaker.name)
        vocab = speaker.model.vocab
        opened_branch = ctx.branches[first_branch]
        opened_branch.sampler = Sampler(sampling, prompt, speaker.ends, vocab, speaker.text)
        opened_branch.limit = len(prompt) + min(max_tokens, remaining_room)
        first_branches.append(first_branch)
    shared_prompts = [
        pair for pair in zip(first_branches, prompts, copies, strict=True) if pair[2] > 1
    ]
    if shared_prompts:
        yield [
            Ask(TokenTree(text[-1]), speaker.name, shared_branch, rows=())
            for shared_branch, text, _ in shared_prompts
        ]
    branch_groups = []
    for first_branch, count in zip(first_branches, copies, strict=True):
        copied_branches = (yield Fork(first_branch, count - 1, quiet=True)) if count > 1 else []
        branch_groups.append([first_branch, *copied_branches])
    return branch_groups


def write_answer(
    ctx: Context,
    speaker: Speaker,
    drafter: Drafter | None = None,
    is_over: Callable[[str], object] | None = None,
) -> Steps:
    """Writes the answer on the quiet branch of `ctx`: to an end, a stop or its limit, or until its
    last words are `is_over`. An end itself may be left out.
    """
    branch = ctx.branches[ctx.branch]
    steps = draw_tokens(ctx, speaker) if drafter is None else Speculative(drafter).run(ctx)
    answer: Any = None
    try:
        while len(branch.tokens) < branch.limit:
            try:
                message = steps.send(answer)
            except StopIteration:
                return
            answer = yield message
            if isinstance(message, Commit) and message.branch == ctx.branch:
                if branch.sampler.is_ended(branch.output):
                    return
                if is_over is not None and is_over(speaker.text(branch.output[-TAIL:])):
                    return
    finally:
        steps.close()


def draw_tokens(ctx: Context, speaker: Speaker) -> Generator[Message, Any, None]:
    """Draws tokens up to an end, which it does not write."""
    while True:
        reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), speaker.name, ctx.branch)
        distribution = ctx.sampler.law(reply.logits[0], ctx.output)
        token = ctx.rng.sample(distribution, "target", len(ctx.output))
        if token in ctx.sampler.stops:
            return
        yield Commit([token], torch.empty(0), ctx.branch)


def choose_option(
    ctx: Context, speaker: Speaker, options: Sequence[str]
) -> Generator[Message, Any, int]:
    """Writes one of these texts, of which none begins another; returns its number.

    Its tokens are drawn from the model's distribution over those that go on with one of them. Where
    all go on with the same token there is nothing to ask.
    """
    option_tokens = [
        continue_tokens(speaker.words, ctx.tokens, option_text.encode(), WINDOW)
        for option_text in options
    ]
    remaining_options = list(range(len(options)))
    token_index = 0
    while len(remaining_options) > 1:
        next_tokens = sorted({option_tokens[number][token_index] for number in remaining_options})
        token = next_tokens[0]
        if len(next_tokens) > 1:
            reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), speaker.name, ctx.branch)
            masked_row = torch.full_like(reply.logits[0], -torch.inf)
            masked_row[next_tokens] = reply.logits[0][next_tokens]
            distribution = ctx.sampler.law(masked_row, ctx.output)
            token = ctx.rng.sample(distribution, "target", len(ctx.output))
        yield Commit([token], torch.empty(0), ctx.branch)
        remaining_options = [
            number for number in remaining_options if option_tokens[number][token_index] == token
        ]
        token_index += 1
    if remaining_tokens := option_tokens[remaining_options[0]][token_index:]:
        yield Commit(remaining_tokens, torch.empty(0), ctx.branch)
    return remaining_options[0]


def answer_questions(
    ctx: Context,
    speaker: Speaker,
    questions: Sequence[Sequence[Turn]],
    copies: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    drafter: Drafter | None = None,
    is_over: Callable[[str], object] | None = None,
    reserve_room: Callable[[int], int] = lambda room: 0,
) -> Generator[Message, Any, list[list[str]]]:
    """Writes so many answers to each question, side by side: see `open_branches` and
    `write_answer`.
    """
    prompts = [speaker.prompt(turns) for turns in questions]
    branch_groups = yield from open_branches(
        ctx, speaker, prompts, copies, sampling, max_tokens, reserve_room
    )
    branches = [branch for group in branch_groups for branch in group]
    yield Together(
        [write_answer(ctx.on(branch_index), speaker, drafter, is_over) for branch_index in branches]
    )
    answer_texts = [
        [speaker.text(ctx.branches[branch_index].output) for branch_index in group]
        for group in branch_groups
    ]
    for branch in branches:
        yield Drop(branch)
    return answer_texts


def count_questions(ctx: Context, note_name: str, question_count: int) -> None:
    """Counts questions in the request's statistics."""
    ctx.stats.notes[note_name] = ctx.stats.notes.get(note_name, 0) + question_count
