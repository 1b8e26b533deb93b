"""A model that repeats what another one said: its logits are one-hot on the recorded next token.

A row is one-hot where its node lies on the recorded text, and zero elsewhere, so that a draft
learns nothing of the recording that it did not guess. It has no layers, so its caches hold no rows,
and its rows are no logits to learn from, which is why it has the capability `tree` alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foretell.cache.job import Job
from foretell.core.model import STEP, Model
from foretell.core.sampling_options import HUGE

NOTHING = -1  # in place of a token: nothing is recorded after this node


class Recording(Model):
    """`text`: the recorded token ids, prompt included; set it before a request, whose prompt it
    begins with.

    Rows are valid until the next forward only: they lie in one buffer, whose ones are reset then.
    """

    caps = frozenset({"tree"})

    def __init__(self, vocab: int, text: Sequence[int] = ()):
        self.name = "a recording"
        self.vocab = vocab
        self.context = HUGE
        self.layout = ()
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.text = text
        self.rows = np.zeros((1, vocab), np.float32)
        self.ones: list[tuple[int, int]] = []  # (row, token) of the buffer

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if len(row_indices) > len(self.rows):
            self.rows = np.zeros((len(row_indices), self.vocab), np.float32)
            self.ones = []
        for buffer_cell in self.ones:
            self.rows[buffer_cell] = 0
        self.ones = []
        row = 0
        for job in STEP.get():
            recorded = self._recorded_tokens(job)
            for node in job.rows:
                if recorded[node] != NOTHING:
                    self.ones.append((row, recorded[node]))
                row += 1
        for buffer_cell in self.ones:
            self.rows[buffer_cell] = 1
        return torch.from_numpy(self.rows[:row]), {}

    def _recorded_tokens(self, job: Job) -> list[int]:
        """The token recorded after each new node; NOTHING off the recorded text and at its end."""
        tokens = [*job.cache.tokens, *job.tokens]
        last_position = len(self.text) - 1
        wrong_nodes = [
            index
            for index, (token, position) in enumerate(
                zip(tokens, job.scratch_positions, strict=True)
            )
            if position > last_position or self.text[position] != token
        ]
        if job.seen is None:
            scratch_count = len(tokens) - len(job.tokens)
            on_text = [
                not wrong_nodes or scratch_count + index < wrong_nodes[0]
                for index in range(len(job.tokens))
            ]
        else:
            on_text = (~job.seen[:, wrong_nodes].any(1)).tolist()
        return [
            self.text[position + 1] if is_right and position < last_position else NOTHING
            for is_right, position in zip(on_text, job.positions, strict=True)
        ]
