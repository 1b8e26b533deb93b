"""A toy draft model that learns: what it has learnt is a hash of its lessons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foretell.core.model import Model
from foretell.models.decoder.learning import Learning
from foretell.models.online import Lesson
from foretell.testing.toy import Toy
from foretell.testing.toy_hashes import GOLDEN, mix_bits


class ToyLearning(Toy):
    """A toy that methods may let learn."""

    def learning(self) -> Learning:
        return Learning(self, ToyScholar)


class ToyScholar:
    """A scholar whose weights are a toy with noise that is a function of all lessons so far, in
    their order: any lesson more, less or other gives other drafts.
    """

    def __init__(self, model: Learning, rate: float | None):
        self.model = model
        self.seen = np.uint64(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> ToyScholar:
        scholar_copy = ToyScholar(self.model, None)
        scholar_copy.seen = self.seen
        return scholar_copy

    def learn(self, lessons: Sequence[Lesson]) -> Model:
        for lesson in lessons:
            for number in (*lesson.ids, *lesson.direct, len(lesson.ids)):
                with np.errstate(over="ignore"):
                    hash_input = np.array(self.seen * GOLDEN + np.uint64(number + 1))
                    self.seen = np.uint64(mix_bits(hash_input))
        toy: Toy = self.model.base
        noise = 0.2 + 0.8 * float(self.seen >> np.uint64(11)) * 2.0**-53
        return Toy(
            toy.vocab, toy.seed, noise, toy.sharpness, toy.context, toy.copy, toy.window, toy.name
        )
