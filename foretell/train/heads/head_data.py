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
from foretell.train.answers import Text, read_texts
from foretell.train.draft import HELD_BACK, ROUND
from foretell.train.states import load_states

LEAST = 8  # tokens of an answer that is of use
NONE = torch.empty(0, 0)
ROWS = 128  # whose distributions over the whole vocabulary are there at a time


@dataclass
class Known:
    """A text with its states (n, F), on disk until they are read."""

    tokens: np.ndarray
    prompt: int
    top_tokens: np.ndarray  # (n - prompt,) the target's best token at each place of the answer
    states: torch.Tensor


class Corpus:
    """All answers with their states, those for measuring aside.

    `states`: a file beside each file of answers; None: their states are not kept, (n, 0).
    """

    def __init__(self, files: Sequence[Path], states: Sequence[Path] | None, window: int):
        self.train: list[Known] = []
        self.held_back: list[Known] = []
        text_count = 0
        states_files: Sequence[Path | None] = states or [None] * len(files)
        for file, states_file in zip(files, states_files, strict=True):
            rows = None if states_file is None else load_states(states_file)
            start = 0
            texts = list(read_texts(file))
            needed_rows = sum(len(text.tokens) for text in texts)
            if rows is not None and len(rows) != needed_rows:
                complaint = f"has states of {len(rows)} tokens, and {file.name} has {needed_rows}"
                raise BadFile(f"{states_file}: {complaint}; delete it to have it made")
            for text in texts:
                count = len(text.tokens)
                part = torch.zeros(count, 0) if rows is None else rows[start : start + count]
                known_text = self._known_text(text, part, window)
                start += count
                if known_text is None:
                    continue
                (self.held_back if text_count % HELD_BACK == 0 else self.train).append(known_text)
                text_count += 1
        if not self.train or not self.held_back:
            raise BadConfig("there are too few answers to train on; give more prompts")

    @staticmethod
    def _known_text(text: Text, states: torch.Tensor, window: int) -> Known | None:
        end = min(window, len(text.tokens))
        if end - text.prompt < LEAST:
            return None
        top_tokens = text.top_tokens[: end - text.prompt, 0]
        return Known(text.tokens[:end], text.prompt, top_tokens, states[:end])

    def commonest(self, count: int, vocab: int) -> torch.Tensor:
        """The tokens that answers have most often, ascending."""
        answer_tokens = np.concatenate([text.tokens[text.prompt :] for text in self.train])
        token_counts = np.bincount(answer_tokens, minlength=vocab)
        return torch.from_numpy(np.sort(np.argsort(-token_counts, kind="stable")[:count]))


class Teacher:
    """Parts of the target that the head's training reads: embeddings, last norm, output matrix."""

    def __init__(self, target: Any, taps: Sequence[int], head: Head, draft_tokens: torch.Tensor):
        self.target = target
        self.taps = list(taps)  # those that the states hold, side by side
        self.head = head
        self.vocab = target.vocab
        self.output = Output(target, draft_tokens)
        self.device = next(head.parameters()).device
        dtype = torch.bfloat16
        self.weight = self.output.train_weight().to(self.device, dtype)
        self.names = torch.full((target.vocab,), -1)
        self.names[draft_tokens] = torch.arange(len(draft_tokens))
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
            text_end = len(text.tokens)
            ids[row, :text_end] = torch.from_numpy(text.tokens.astype(np.int64))
            answers[row, text.prompt : text_end] = True
            states[row, :text_end] = text.states
        by_tap = dict(zip(self.taps, states.chunk(len(self.taps), -1), strict=True))
        last_states = by_tap[self.head.config.target.layers]
        finals = self.normed(last_states)
        feature_parts = [by_tap[tap] for tap in self.head.taps]
        if self.head.reads_normed:
            feature_parts = [self.normed(part) for part in feature_parts]
        features = torch.cat(feature_parts, -1)
        if noise:
            generator = torch.Generator().manual_seed(seed)
            noise_spread = noise * 512 / length
            added_noise = torch.rand(features.shape, generator=generator) - 0.5
            features = features + (added_noise * noise_spread).to(features)
        features = F.pad(features, (0, 0, self.head.lag, 0))[:, :length]
        batch_parts = (ids, self.embeddings[ids], features, finals)
        return Texts(*(part.to(self.device) for part in batch_parts)), answers

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        return self.output.norm_states(states.to(self.target.device).float()).to(torch.bfloat16)

    @torch.no_grad()
    def laws(self, finals: torch.Tensor) -> torch.Tensor:
        """Normed states (m, E) -> the target's distributions (m, Vd) over the kept tokens."""
        return (finals.to(self.weight.dtype) @ self.weight.T).float().softmax(-1)

    @torch.no_grad()
    def likeliest_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Normed states (m, E) -> (m,) the number of the likeliest kept token."""
        parts = [
            (rows.to(self.weight.dtype) @ self.weight.T).argmax(-1) for rows in states.split(ROWS)
        ]
        return torch.cat(parts)

    @cached_property
    def full_matrix(self) -> torch.Tensor:
        """(V, E): the target's output matrix."""
        return Output(self.target, None).train_weight().to(self.device, self.weight.dtype)

    @torch.no_grad()
    def true_laws(self, finals: torch.Tensor) -> torch.Tensor:
        """Laws (m, Vd) over all of the vocabulary, of which rows are the kept tokens' part."""
        draft_tokens = torch.tensor(self.output.tokens, device=self.device)
        parts = [
            (rows.to(self.weight.dtype) @ self.full_matrix.T).float().softmax(-1)[:, draft_tokens]
            for rows in finals.split(ROWS)
        ]
        return torch.cat(parts)


def answer_places(
    answers: torch.Tensor, depth: int, anchors: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows and places (m, 2) from which a token of an answer is drafted at this depth: that
    `depth + 1` tokens on. `anchors` (n,) bool: the only places that count.
    """
    drafted = answers[:, depth + 1 :]
    if anchors is not None:
        drafted = drafted & anchors[: drafted.shape[1]].to(drafted.device)
    return drafted.nonzero()
