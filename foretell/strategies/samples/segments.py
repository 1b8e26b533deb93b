"""Reasoning in segments: the marks between them, and how a summary is asked for.

    first      question                                  <think> .. </think><summary> .. </summary>
    later      question<history> summary </history>      <think> .. </think><summary> .. </summary>
    last       question<history> summary </history>      <think> .. </think> conclusion

Source: Yan et al., InftyThink, arXiv:2503.06692, section 3; of its repository
inference/infer_single.py and data_preprocess/generate_data.py. What is asked is in other words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from foretell.core.distribution import Sampler
from foretell.core.tokenizer_bytes import Words
from foretell.errors import BadConfig, PromptTooLong, Unsupported
from foretell.rewards.questions import LEAST, Speaker

if TYPE_CHECKING:
    from foretell.core.context import Branch, Context

THINK, THOUGHT = "<think>", "</think>"
SUMMARY, SUMMED = "<summary>", "</summary>"
HISTORY, KNOWN = "<history>", "</history>"
MARKS = (THINK, THOUGHT, SUMMARY, SUMMED, HISTORY, KNOWN)
ANY_MARK = re.compile(f"({'|'.join(MARKS)})")
OPEN, CLOSE = f"\n{SUMMARY}\n", f"\n{SUMMED}\n"
OPEN_BEHIND = f"\n{THOUGHT}{OPEN}"  # where thoughts are open
OPENED = 16  # last tokens of a prompt that may open the thoughts

LIST = """Your last message breaks off in the middle of the work. List what it has achieved: all key
steps and all important intermediate results, in their order, each after a `*`. Be brief, add
nothing new, give no answer that is not found yet, and write nothing but the list."""
UPDATE = """Your last message goes on from the summary at its beginning, and breaks off in the
middle of the work. Write that summary anew, with what has been achieved since: all key steps and
all important intermediate results, in their order, each after a `*`. Be brief, add nothing new,
give no answer that is not found yet, and write nothing but the list."""


@dataclass
class Watch:
    """Follows a text token by token. `ends`: of each mark written, tokens up to its first end."""

    words: Words
    length: int = 0  # tokens
    ends: dict[str, int] = field(default_factory=dict)
    tail: bytes = b""

    def push(self, token: int) -> None:
        self.length += 1
        recent_bytes = self.tail + shown_bytes(self.words, token)
        for mark in MARKS:
            if mark.encode() in recent_bytes:
                self.ends.setdefault(mark, self.length)
        self.tail = recent_bytes[-16:]  # longer than any mark

    @property
    def thinking(self) -> bool:
        """Whether thoughts are open."""
        return THINK in self.ends and THOUGHT not in self.ends


def shown_bytes(words: Words, token: int) -> bytes:
    """A token as it is written, and a special one by its name if it is a mark."""
    token_name = words.names.get(token, "")
    return words.piece(token) or (token_name.encode() if token_name in MARKS else b"")


def shown_text(words: Words, tokens: Sequence[int]) -> str:
    """The text of tokens, marks included."""
    return b"".join(shown_bytes(words, token) for token in tokens).decode("utf-8", "replace")


def encode_marked(words: Words, text: str) -> list[int]:
    """The tokens of a text with marks, which may be special tokens of the model."""
    tokens: list[int] = []
    for text_part in filter(None, ANY_MARK.split(text)):
        if text_part in MARKS and text_part in words.specials:
            tokens.append(words.specials[text_part])
        else:
            tokens += words.encode(text_part.encode("utf-8", "replace"))
    return tokens


def count_opening(words: Words, prompt: Sequence[int]) -> int:
    """How many last tokens of a prompt open the thoughts, as some templates do; 0: none."""
    for token_count in range(1, min(OPENED, len(prompt)) + 1):
        if shown_text(words, prompt[-token_count:]).strip() == THINK:
            return token_count
    return 0


def summary_of(text: str) -> str:
    """A summary without its marks, and without thoughts before it."""
    return text.partition(SUMMED)[0].rpartition(SUMMARY)[2].rpartition(THOUGHT)[2].strip()


def question_tokens(speaker: Speaker, question: str) -> list[int]:
    """The tokens that close what a model is writing, and ask it a question. Raises Unsupported."""
    if not getattr(speaker.tokenizer, "chat_template", None):
        return speaker.words.encode(f"\n\n{question}\n\n".encode())
    preceding_tokens = speaker.prompt([("user", "?")])
    full_tokens = speaker.prompt([("user", "?"), ("assistant", ""), ("user", question)])
    if full_tokens[: len(preceding_tokens)] != preceding_tokens:
        raise Unsupported.missing_capability(
            speaker.method,
            speaker.model.name,
            "a chat template that only adds to what was said before",
            "give ask=no, or take another model",
        )
    return full_tokens[len(preceding_tokens) :]


class Config(Protocol):
    """Options of a method about its rounds, in tokens."""

    @property
    def segment(self) -> int: ...

    @property
    def summary(self) -> int: ...

    @property
    def ask(self) -> bool: ...


class Plan:
    """Common ground of all rounds of a request: the tokens of its question and of what is set.

    `opened`: what a summary is set after, by whether thoughts are open; `asked`: what asks for
    one, by whether one was before, or nothing; `reserve`: tokens of a segment that a summary takes.

    Raises BadConfig, PromptTooLong or Unsupported where nothing would be left for thoughts.
    """

    def __init__(self, ctx: Context, method: str, config: Config):
        self.method = method
        self.speaker = Speaker.find_speaker(ctx, method)
        words = self.words = self.speaker.words
        self.speaker.check_writes("".join(MARKS) + (LIST + UPDATE if config.ask else ""))
        self.model = ctx.models["target"]
        prompt = list(ctx.tokens)
        opening_count = count_opening(words, prompt)
        self.head, self.tail = (
            prompt[: len(prompt) - opening_count],
            prompt[len(prompt) - opening_count :],
        )
        self.history_start, self.history_end = (
            encode_marked(words, HISTORY),
            encode_marked(words, KNOWN),
        )
        self.close = encode_marked(words, CLOSE)
        self.opening_marks = [encode_marked(words, OPEN), encode_marked(words, OPEN_BEHIND)]
        questions = (LIST, UPDATE) if config.ask else ()
        self.summary_questions = [question_tokens(self.speaker, question) for question in questions]
        self.summary = (
            config.summary - len(self.history_start) - len(self.history_end)
        )  # without its marks
        longest_mark = max(map(len, [*self.opening_marks, self.close, *self.summary_questions]))
        # Asked for, it has no marks there; set, it has two.
        self.reserve = self.summary + longest_mark + (0 if config.ask else len(self.close))
        self.segment = config.segment
        self._check_room(ctx, len(prompt), config)

    def _check_room(self, ctx: Context, prompt_length: int, config: Config) -> None:
        if self.summary < 1:
            min_summary = config.summary - self.summary + 1
            allowed_range = f"at least {min_summary}, for the model's tokens of its marks"
            raise BadConfig.field(f"{self.method}:summary", config.summary, allowed_range)
        if self.segment <= self.reserve:
            allowed_range = f"above {self.reserve}, which a summary takes with what asks for it"
            raise BadConfig.field(f"{self.method}:segment", self.segment, allowed_range)
        context_size = self.model.context
        if ctx.request.sampling.max_new_tokens > min(self.segment, context_size - prompt_length):
            needed_tokens = prompt_length + config.summary + min(self.segment, self.reserve + LEAST)
            if needed_tokens > context_size:
                raise PromptTooLong(
                    f"{self.method}: to go on from a summary takes a context of {needed_tokens}, "
                    "and "
                    f"{self.model.name} holds {context_size}; lower {self.method}:summary or "
                    "max_new_tokens, or shorten the prompt"
                )

    def prompt(self, history: Sequence[int]) -> list[int]:
        """Prompt of a round, with the summary before it, at first without one."""
        history_tokens = [*self.history_start, *history, *self.history_end] if history else []
        return [*self.head, *history_tokens, *self.tail]

    def history(self, tokens: Sequence[int]) -> list[int]:
        """The summary in what was written since it began, without marks; empty: it says nothing."""
        text = summary_of(shown_text(self.words, tokens))
        return self.words.encode(text.encode("utf-8", "replace"))[: self.summary]


def sampler_of(
    ctx: Context, round_branch: Branch, end_tokens: Sequence[int], **changes: Any
) -> Sampler:
    """Sampler of a round: that of the request, with other options."""
    prompt = round_branch.tokens[: len(round_branch.tokens) - len(round_branch.output)]
    vocab_size = ctx.models["target"].vocab
    return Sampler(
        replace(ctx.request.sampling, **changes), prompt, end_tokens, vocab_size, ctx.request.text
    )
