"""What heads are trained on: a target's answers beside its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from foretell.drafters.heads.networks.base import Head, Texts
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig, BadFile
from foretell.train.answers import Text, read
from foretell.train.draft import HELD_BACK, ROUND
from foretell.train.states import load_states

LEAST = 8  # tokens of an answer that is of use
NONE = torch.empty(0, 0)
ROWS = 128  # whose laws over the whole vocabulary are there at a time


@dataclass
class Known:
    """A text with its states (n, F), on disk until they are read."""

    tokens: np.ndarray
    prompt: int
    best: np.ndarray  # (n - prompt,) the target's best token at each place of the answer
    states: torch.Tensor


class Corpus:
    """All answers with their states, those for measuring aside.

    `states`: a file beside each file of answers; None: their states are not kept, (n, 0).
    """

    def __init__(self, files: Sequence[Path], states: Sequence[Path] | None, window: int):
        self.train: list[Known] = []
        self.held_back: list[Known] = []
        seen = 0
        every: Sequence[Path | None] = states or [None] * len(files)
        for file, beside in zip(files, every, strict=True):
            rows = None if beside is None else load_states(beside)
            start = 0
            texts = list(read(file))
            needed = sum(len(text.tokens) for text in texts)
            if rows is not None and len(rows) != needed:
                what = f"has states of {len(rows)} tokens, and {file.name} has {needed}"
                raise BadFile(f"{beside}: {what}; delete it to have it made")
            for text in texts:
                count = len(text.tokens)
                part = torch.zeros(count, 0) if rows is None else rows[start : start + count]
                known = self._known(text, part, window)
                start += count
                if known is None:
                    continue
                (self.held_back if seen % HELD_BACK == 0 else self.train).append(known)
                seen += 1
        if not self.train or not self.held_back:
            raise BadConfig("there are too few answers to train on; give more prompts")

    @staticmethod
    def _known(text: Text, states: torch.Tensor, window: int) -> Known | None:
        end = min(window, len(text.tokens))
        if end - text.prompt < LEAST:
            return None
        best = text.best[: end - text.prompt, 0]
        return Known(text.tokens[:end], text.prompt, best, states[:end])

    def commonest(self, count: int, vocab: int) -> torch.Tensor:
        """The tokens that answers have most often, ascending."""
        found = np.concatenate([text.tokens[text.prompt :] for text in self.train])
        counts = np.bincount(found, minlength=vocab)
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


class Teacher:
    """What the target has that the head's training reads: embeddings, last norm, output matrix."""

    def __init__(self, target: Any, taps: Sequence[int], head: Head, kept: torch.Tensor):
        self.target = target
        self.taps = list(taps)  # those that the states hold, side by side
        self.head = head
        self.vocab = target.vocab
        self.output = Output(target, kept)
        self.device = next(head.parameters()).device
        dtype = torch.bfloat16
        self.weight = self.output.weight().to(self.device, dtype)
        self.names = torch.full((target.vocab,), -1)
        self.names[kept] = torch.arange(len(kept))
        with torch.inference_mode():
            embeddings = target.embed(range(target.vocab))
        self.embeddings = embeddings.clone().to(dtype)

    @torch.no_grad()
    def texts(self, group: Sequence[Known], noise: float, seed: int) -> tuple[Texts, torch.Tensor]:
        """A batch, and which tokens of it are answers' (B, n) bool."""
        length = -(-max(len(text.tokens) for text in group) // ROUND) * ROUND
        size = (len(group), length)
        ids = torch.zeros(size, dtype=torch.long)
        answers = torch.zeros(size, dtype=torch.bool)
        states = torch.zeros(*size, group[0].states.shape[1], dtype=torch.bfloat16)
        for row, text in enumerate(group):
            end = len(text.tokens)
            ids[row, :end] = torch.from_numpy(text.tokens.astype(np.int64))
            answers[row, text.prompt : end] = True
            states[row, :end] = text.states
        by_tap = dict(zip(self.taps, states.chunk(len(self.taps), -1), strict=True))
        last = by_tap[self.head.config.target.layers]
        finals = self.normed(last)
        parts = [by_tap[tap] for tap in self.head.taps]
        if self.head.reads_normed:
            parts = [self.normed(part) for part in parts]
        features = torch.cat(parts, -1)
        if noise:
            draw = torch.Generator().manual_seed(seed)
            spread = noise * 512 / length
            added = torch.rand(features.shape, generator=draw) - 0.5
            features = features + (added * spread).to(features)
        features = F.pad(features, (0, 0, self.head.lag, 0))[:, :length]
        made = (ids, self.embeddings[ids], features, finals)
        return Texts(*(part.to(self.device) for part in made)), answers

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        return self.output.normed(states.to(self.target.device).float()).to(torch.bfloat16)

    @torch.no_grad()
    def laws(self, finals: torch.Tensor) -> torch.Tensor:
        """Normed states (m, E) -> the target's laws (m, Vd) over the tokens that are kept."""
        return (finals.to(self.weight.dtype) @ self.weight.T).float().softmax(-1)

    @torch.no_grad()
    def best(self, states: torch.Tensor) -> torch.Tensor:
        """Normed states (m, E) -> (m,) the number of the likeliest kept token."""
        parts = [
            (rows.to(self.weight.dtype) @ self.weight.T).argmax(-1) for rows in states.split(ROWS)
        ]
        return torch.cat(parts)

    @cached_property
    def whole(self) -> torch.Tensor:
        """(V, E): the target's output matrix."""
        return Output(self.target, None).weight().to(self.device, self.weight.dtype)

    @torch.no_grad()
    def true_laws(self, finals: torch.Tensor) -> torch.Tensor:
        """As `laws`, but over all of the vocabulary: rows are the kept tokens' part of them."""
        kept = torch.tensor(self.output.tokens, device=self.device)
        parts = [
            (rows.to(self.weight.dtype) @ self.whole.T).float().softmax(-1)[:, kept]
            for rows in finals.split(ROWS)
        ]
        return torch.cat(parts)


def places(answers: torch.Tensor, depth: int, anchors: torch.Tensor | None = None) -> torch.Tensor:
    """(m, 2) rows and places from which a token of an answer is drafted at this depth: that
    `depth + 1` tokens on. `anchors` (n,) bool: the only places that count.
    """
    drafted = answers[:, depth + 1 :]
    if anchors is not None:
        drafted = drafted & anchors[: drafted.shape[1]].to(drafted.device)
    return drafted.nonzero()
