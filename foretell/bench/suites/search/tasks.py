"""What a task of the suite `search` is, whatever its sort."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from foretell.errors import BadConfig
from foretell.rewards.base import Reward

if TYPE_CHECKING:
    from foretell.api.lm import LM

T = TypeVar("T", bound="Task")


@dataclass(frozen=True)
class Task:
    """The base: a question, and how an answer to it is judged.

    An answer is right if its score is 1. What `public` says can be known without knowing what is
    right, so a method may search by it.
    """

    kind: str
    question: str

    sort: ClassVar[str]
    partial: ClassVar[bool] = True  # whether `public` says something of texts that are not finished
    stop: ClassVar[tuple[str, ...]] = ()

    @property
    def opening(self) -> str:
        """Text that a chat model's answer begins with; it goes on from there."""
        return ""

    @property
    def head(self) -> str:
        """The prompt of a model that continues texts."""
        return f"{self.question}\n\n{self.opening}"

    def encode_prompt(self, lm: LM) -> tuple[list[int], str]:
        """The prompt as token ids, and what is to be put before an answer to judge it."""
        if lm.tokenizer is None or not lm.tokenizer.chat_template:
            return lm.prompt_ids(self.head), self.answer_prefix(self.head)
        question = lm.prompt_ids([{"role": "user", "content": self.question}])
        opening = lm.encode(self.opening, special=False) if self.opening else []
        return [*question, *opening], self.answer_prefix(self.opening)

    def answer_prefix(self, opening: str) -> str:
        """Part of this opening that belongs to the answer."""
        return self.opening

    def score_answer(self, text: str) -> float:
        """Scores an answer from 0 to 1, which is right."""
        raise NotImplementedError

    def public(self, text: str) -> float:
        """Scores what can be known of an answer, from 0 to 1."""
        raise NotImplementedError

    def count_correct(self, answers: Sequence[str]) -> int | None:
        """How many different right things the answers name, where a task asks for several."""
        return None


@dataclass(frozen=True, eq=False)
class Public(Reward):
    """A reward by what can be known of a task's answers without knowing what is right."""

    task: Task
    answer_prefix: str  # stands before every text
    partial: bool = True

    @classmethod
    def of(cls, task: Task, answer_prefix: str) -> Public:
        return cls(task, answer_prefix, task.partial)

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [self.task.public(self.answer_prefix + text) for text in texts]


def make_distinct(
    forms: Sequence[Callable[[random.Random], T]], count: int, seed: int, sort: str
) -> list[T]:
    """Makes `count` tasks of these forms in turn, no question twice. Raises BadConfig where there
    are fewer.
    """
    generator = random.Random(seed)
    tasks_by_question: dict[str, T] = {}
    for attempt in range(20 * count + 100):
        if len(tasks_by_question) == count:
            return list(tasks_by_question.values())
        task = forms[attempt % len(forms)](generator)
        tasks_by_question.setdefault(task.question, task)
    raise BadConfig(f"--limit {count}: so many different {sort} cannot be made; take fewer")
