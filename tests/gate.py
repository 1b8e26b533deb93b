"""A logits processor that lets a test stop an engine in the middle of a step."""

from __future__ import annotations

import threading

import torch


class Gate:
    """A user's processor that stops its request at a token until it is opened."""

    def __init__(self, wait_at: int):
        self.wait_at = wait_at
        self.calls = 0
        self.reached = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.wait_at:
            self.reached.set()
            assert self._opened.wait(30)
        return scores
