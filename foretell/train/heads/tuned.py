"""A model that is tuned by a LoRA together with rows beside its texts: what such trainers share.

The rows learn to say tokens further on, and the model to say them by such rows. What comes of it is
another model than the target, with texts of its own, whose last norm is its own as well: by that
the rows, which enter texts unverified, are told to belong to it and to no other.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.anchored import Anchored
from foretell.drafters.heads.networks.folder import save
from foretell.errors import BadConfig, ForetellWarning
from foretell.ops.files import write_text
from foretell.train.answers import Text, read
from foretell.train.draft import HELD_BACK, blocks
from foretell.train.heads.anchored import Through, freeze
from foretell.train.heads.head_data import LEAST
from foretell.train.heads.medusa_2 import FORMATS, adapted
from foretell.train.heads.medusa_2 import check as check_package
from foretell.train.lm import Run
from foretell.train.objectives import CHUNK

if TYPE_CHECKING:
    from foretell.api.lm import LM


def check(merged: str) -> None:
    """Raises BadConfig for what is no number format, Unsupported without the package `peft`."""
    if merged not in FORMATS:
        raise BadConfig.field("merged", merged, f"one of {', '.join(FORMATS)}")
    check_package(merged)


def answers_of(files: Sequence[Path], window: int) -> tuple[list[Text], list[Text]]:
    """Those to learn from and those held back, cut to the window. Raises BadConfig."""
    learnt: list[Text] = []
    held_back: list[Text] = []
    seen = 0
    for file in files:
        for text in read(file):
            end = min(window, len(text.tokens))
            if end - text.prompt < LEAST:
                continue
            size = end - text.prompt
            cut = Text(text.tokens[:end], text.prompt, text.best[:size], text.logprobs[:size])
            (held_back if seen % HELD_BACK == 0 else learnt).append(cut)
            seen += 1
    if not learnt or not held_back:
        raise BadConfig("there are too few answers to train on; give more prompts")
    return learnt, held_back


class Tuned(nn.Module):
    """The adapted target and its rows, trained as one. `config`: as `medusa_2.adapted` reads it."""

    def __init__(self, target: Any, head: Anchored, config: Any):
        super().__init__()
        freeze(target.hf)
        self.adapted = adapted(target.hf, config)
        self.head: Any = head
        self.through = Through(target, frozen=False)
        self.norm: nn.Parameter = self.through.loop.norm.weight
        self.norm.requires_grad_(True)
        self.norm_before = self.norm.detach().clone()

    @property
    def tuned(self) -> list[nn.Parameter]:
        """The parameters of the target that are trained."""
        return [p for p in self.adapted.parameters() if p.requires_grad]

    @contextmanager
    def before(self) -> Iterator[None]:
        """The target as it was before any training, without gradients."""
        now, training = self.norm.detach().clone(), self.adapted.training
        self.adapted.eval()
        with torch.no_grad(), self.adapted.disable_adapter():
            self.norm.copy_(self.norm_before)
            try:
                yield
            finally:
                self.norm.copy_(now)
                self.adapted.train(training)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Normed states (m, E) -> (m, V), float32."""
        return (states @ self.through.weight.T).float()

    def cross_entropy(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean over rows (m, E) of -ln of the chance of their tokens (m,)."""
        parts = zip(states.split(CHUNK), labels.split(CHUNK), strict=True)
        losses = [F.cross_entropy(self.logits(s), t, reduction="sum") for s, t in parts]
        return torch.stack(losses).sum() / len(labels)

    def tokens(self, text: Text) -> torch.Tensor:
        return torch.from_numpy(text.tokens.astype(np.int64)).to(self.through.device)

    def answer_loss(self, finals: torch.Tensor, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
        """Of the ordinary next token, over an answer behind `prompt` tokens."""
        return self.cross_entropy(finals[prompt - 1 : -1], tokens[prompt:])

    @torch.no_grad()
    def perplexity(self, texts: Sequence[Text]) -> float:
        """Of these answers."""
        nats, count = 0.0, 0
        for text in texts:
            tokens = self.tokens(text)
            _, finals, _ = self.through.text(tokens)
            size = len(tokens) - text.prompt
            nats += size * float(self.answer_loss(finals, tokens, text.prompt))
            count += size
        return math.exp(nats / count)


LossOf = Callable[[Tuned, Text, Any, int], torch.Tensor]


class TunedRun(Run):
    """A run folder of adapters and rows, whose steps are groups of answers."""

    def __init__(self, folder: Path, config: Any, model: Tuned):
        self.groups: list[list[int]] = []
        self.rounds = 0
        super().__init__(folder, config, model, model.head)

    def rated(self, layers: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        settings: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
        c = self.config
        parts = ((self.model.tuned, c.rate), ([*layers.parameters()], c.row_rate))
        return [(torch.optim.AdamW(part, lr=rate, **settings), rate) for part, rate in parts]

    def advance_on(self, texts: Sequence[Text], loss_of: LossOf) -> float:
        """One optimiser step; returns its mean loss."""
        config: Any = self.config
        while len(self.groups) <= self.step:
            lengths = [len(text.tokens) for text in texts]
            self.groups += blocks(lengths, config.batch, config.seed * 1_000 + self.rounds)
            self.rounds += 1
        group = self.groups[self.step]
        total = 0.0
        for number in group:
            seed = (config.seed * 1_000_003 + self.step) * 4_096 + number
            torch.manual_seed(seed)  # of dropout
            loss = loss_of(self.model, texts[number], config, seed) / len(group)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.update()
        return total

    def learn(
        self,
        texts: Sequence[Text],
        held_back: Sequence[Text],
        loss_of: LossOf,
        save_every: float,
        quiet: bool,
    ) -> dict[str, Any]:
        """Trains to the end; what every such trainer reports of it."""
        model, config = self.model, self.config
        model.adapted.train()
        self.through(partial(self.advance_on, texts, loss_of), save_every, quiet)
        model.adapted.eval()
        with model.before():
            before = model.perplexity(held_back)
        after = model.perplexity(held_back)
        return {
            "parameters": self.size,
            "tokens_seen": config.steps * config.batch,
            "answers": len(texts),
            "perplexity": {"before": round(before, 4), "after": round(after, 4)},
            "settings": asdict(config),
        }


def export(
    lm: LM, model: Tuned, out: Path, merged: str, about: dict[str, Any], report: Mapping[str, Any]
) -> None:
    """Writes OUT/model, of matrices that are added up in float32 and rounded to the number format
    `merged`, OUT/head, the rows that were made with it, and OUT/report.json.
    """
    target: Any = lm.models["target"]
    before = model.norm_before.to(FORMATS[merged])
    whole = model.adapted.merge_and_unload().to(FORMATS[merged])
    if torch.equal(model.through.loop.norm.weight.to(before), before):
        warnings.warn(
            f"{out}: so little was trained that its last norm is the target's, beside which its "
            "rows will not be refused; train longer, or at a higher rate",
            ForetellWarning,
            stacklevel=2,
        )
    whole.save_pretrained(out / "model")
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(out / "model")
    save(model.head, None, out / "head", target, about)  # its mark is that of the rounded norm
    write_text(out / "report.json", json.dumps(report, indent=1))
