"""Counts what a model computes for a request."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from foretell.core.model import Model
from foretell.core.types import Reply


class Meter:
    """While it is open, `tokens` counts those that go through the model, of all branches and
    drafts. The prompt of `prompt` tokens is left out once, of the text that is computed first.
    """

    def __init__(self, model: Model, prompt_length: int):
        self.model = model
        self.prompt = prompt_length
        self.first: Any = None  # the cache of the text that is computed first
        self.tokens = 0

    def __enter__(self) -> Meter:
        forward = self.model.forward

        def counted(jobs: Sequence[Any]) -> list[Reply]:
            for job in jobs:
                self.note(job)
            return forward(jobs)

        vars(self.model)["forward"] = counted  # stands before the class's own
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del vars(self.model)["forward"]

    def note(self, job: Any) -> None:
        """`job`: a cache.job.Job"""
        if self.first is None:
            self.first = job.cache
        of_prompt = job.cache is self.first
        self.tokens += sum(not (of_prompt and position < self.prompt) for position in job.positions)
