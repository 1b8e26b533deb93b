"""A model that says again what another one said: its logits are one-hot on the recorded next token.

A row is one-hot where its node lies on the recorded text, and zero elsewhere, so that a draft
learns nothing of the recording that it did not guess. It has no layers, so its caches hold no rows,
and its rows are no logits to learn from, which is why it has the capability `tree` alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foretell.core.model import STEP, Model
from foretell.core.types import HUGE
from foretell.memory.job import Job


class Recording(Model):
    """`text`: the recorded token ids, prompt included; set it before a request, whose prompt it
    begins with.

    Rows stay valid until the next forward only: they lie in one buffer, whose ones are taken back
    then.
    """

    caps = frozenset({"tree"})

    def __init__(self, vocab: int, text: Sequence[int] = ()):
        self.name, self.vocab, self.context, self.layout = "a recording", vocab, HUGE, ()
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.text = text
        self.rows = np.zeros((1, vocab), np.float32)
        self.ones: list[tuple[int, int]] = []  # (row, token) of the buffer

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if len(rows) > len(self.rows):
            self.rows, self.ones = np.zeros((len(rows), self.vocab), np.float32), []
        for at in self.ones:
            self.rows[at] = 0
        self.ones, row = [], 0
        for job in STEP.get():
            said = self._said(job)
            for node in job.rows:
                if said[node] >= 0:
                    self.ones.append((row, said[node]))
                row += 1
        for at in self.ones:
            self.rows[at] = 1
        return torch.from_numpy(self.rows[:row]), {}

    def _said(self, job: Job) -> list[int]:
        """Of each new node the token recorded behind it; -1 off the recorded text and at its
        end.
        """
        tokens, last = [*job.cache.tokens, *job.tokens], len(self.text) - 1
        wrong = [
            i
            for i, (t, p) in enumerate(zip(tokens, job.columns, strict=True))
            if p > last or self.text[p] != t
        ]
        if job.seen is None:
            good = len(tokens) - len(job.tokens)
            fine = [not wrong or good + n < wrong[0] for n in range(len(job.tokens))]
        else:
            fine = (~job.seen[:, wrong].any(1)).tolist()
        return [
            self.text[p + 1] if ok and p < last else -1
            for ok, p in zip(fine, job.positions, strict=True)
        ]
