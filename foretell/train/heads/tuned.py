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
from foretell.drafters.heads.networks.folder import save_head
from foretell.errors import BadConfig, ForetellWarning
from foretell.ops.files import write_text
from foretell.train.answers import Text, read_texts
from foretell.train.draft import HELD_BACK, group_lengths
from foretell.train.heads.anchored import Through, freeze_weights
from foretell.train.heads.head_data import LEAST
from foretell.train.heads.medusa_2 import FORMATS, add_adapters
from foretell.train.heads.medusa_2 import check_format as check_package
from foretell.train.lm import Run
from foretell.train.objectives import CHUNK

if TYPE_CHECKING:
    from foretell.api.lm import LM


def check_tuning(format_name: str) -> None:
    """Raises BadConfig for what is no number format, Unsupported without the package `peft`."""
    if format_name not in FORMATS:
        raise BadConfig.field("merged", format_name, f"one of {', '.join(FORMATS)}")
    check_package(format_name)


def split_answers(files: Sequence[Path], window: int) -> tuple[list[Text], list[Text]]:
    """Answers to learn from and those held back, cut to the window. Raises BadConfig."""
    learnt: list[Text] = []
    held_back: list[Text] = []
    answer_count = 0
    for file in files:
        for text in read_texts(file):
            text_end = min(window, len(text.tokens))
            if text_end - text.prompt < LEAST:
                continue
            answer_length = text_end - text.prompt
            cut_answer = Text(
                text.tokens[:text_end],
                text.prompt,
                text.top_tokens[:answer_length],
                text.logprobs[:answer_length],
            )
            (held_back if answer_count % HELD_BACK == 0 else learnt).append(cut_answer)
            answer_count += 1
    if not learnt or not held_back:
        raise BadConfig("there are too few answers to train on; give more prompts")
    return learnt, held_back


class Tuned(nn.Module):
    """The adapted target and its rows, trained as one. `config`: as `medusa_2.adapted` reads it."""

    def __init__(self, target: Any, head: Anchored, config: Any):
        super().__init__()
        freeze_weights(target.hf)
        self.adapted = add_adapters(target.hf, config)
        self.head: Any = head
        self.through = Through(target, frozen=False)
        self.norm: nn.Parameter = self.through.loop.norm.weight
        self.norm.requires_grad_(True)
        self.norm_before = self.norm.detach().clone()

    @property
    def tuned_parameters(self) -> list[nn.Parameter]:
        """The parameters of the target that are trained."""
        return [p for p in self.adapted.parameters() if p.requires_grad]

    @contextmanager
    def original_target(self) -> Iterator[None]:
        """The target as it was before any training, without gradients."""
        norm_now, training = self.norm.detach().clone(), self.adapted.training
        self.adapted.eval()
        with torch.no_grad(), self.adapted.disable_adapter():
            self.norm.copy_(self.norm_before)
            try:
                yield
            finally:
                self.norm.copy_(norm_now)
                self.adapted.train(training)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Normed states (m, E) -> (m, V), float32."""
        return (states @ self.through.weight.T).float()

    def cross_entropy(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean over rows (m, E) of -ln of the probability of their tokens (m,)."""
        parts = zip(states.split(CHUNK), labels.split(CHUNK), strict=True)
        losses = [F.cross_entropy(self.logits(s), t, reduction="sum") for s, t in parts]
        return torch.stack(losses).sum() / len(labels)

    def tokens(self, text: Text) -> torch.Tensor:
        return torch.from_numpy(text.tokens.astype(np.int64)).to(self.through.device)

    def answer_loss(self, finals: torch.Tensor, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
        """Mean loss of the ordinary next token, over an answer after `prompt` tokens."""
        return self.cross_entropy(finals[prompt - 1 : -1], tokens[prompt:])

    @torch.no_grad()
    def perplexity(self, texts: Sequence[Text]) -> float:
        """Perplexity of these answers."""
        nat_sum, token_count = 0.0, 0
        for text in texts:
            tokens = self.tokens(text)
            _, finals, _ = self.through.text(tokens)
            answer_length = len(tokens) - text.prompt
            nat_sum += answer_length * float(self.answer_loss(finals, tokens, text.prompt))
            token_count += answer_length
        return math.exp(nat_sum / token_count)


LossOf = Callable[[Tuned, Text, Any, int], torch.Tensor]


class TunedRun(Run):
    """A run folder of adapters and rows, whose steps are groups of answers."""

    def __init__(self, folder: Path, config: Any, model: Tuned):
        self.groups: list[list[int]] = []
        self.rounds = 0
        super().__init__(folder, config, model, model.head)

    def make_optimisers(self, layers: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        settings: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
        c = self.config
        parts = ((self.model.tuned_parameters, c.rate), ([*layers.parameters()], c.row_rate))
        return [(torch.optim.AdamW(part, lr=rate, **settings), rate) for part, rate in parts]

    def advance_on(self, texts: Sequence[Text], loss_of: LossOf) -> float:
        """Takes an optimiser step; returns its mean loss."""
        config: Any = self.config
        while len(self.groups) <= self.step:
            lengths = [len(text.tokens) for text in texts]
            self.groups += group_lengths(lengths, config.batch, config.seed * 1_000 + self.rounds)
            self.rounds += 1
        text_group = self.groups[self.step]
        loss_sum = 0.0
        for number in text_group:
            seed = (config.seed * 1_000_003 + self.step) * 4_096 + number
            torch.manual_seed(seed)  # of dropout
            loss = loss_of(self.model, texts[number], config, seed) / len(text_group)
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
        self.update()
        return loss_sum

    def learn(
        self,
        texts: Sequence[Text],
        held_back: Sequence[Text],
        loss_of: LossOf,
        save_every: float,
        quiet: bool,
    ) -> dict[str, Any]:
        """Trains to the end; returns what every such trainer reports."""
        model, config = self.model, self.config
        model.adapted.train()
        self.run_steps(partial(self.advance_on, texts, loss_of), save_every, quiet)
        model.adapted.eval()
        with model.original_target():
            perplexity_before = model.perplexity(held_back)
        perplexity_after = model.perplexity(held_back)
        return {
            "parameters": self.parameter_count,
            "tokens_seen": config.steps * config.batch,
            "answers": len(texts),
            "perplexity": {
                "before": round(perplexity_before, 4),
                "after": round(perplexity_after, 4),
            },
            "settings": asdict(config),
        }


def export_tuned(
    lm: LM,
    model: Tuned,
    out: Path,
    format_name: str,
    metadata: dict[str, Any],
    report: Mapping[str, Any],
) -> None:
    """Writes OUT/model, of matrices that are added up in float32 and rounded to the number format
    `format_name`, OUT/head, the rows that were made with it, and OUT/report.json.
    """
    target: Any = lm.models["target"]
    rounded_norm = model.norm_before.to(FORMATS[format_name])
    merged_model = model.adapted.merge_and_unload().to(FORMATS[format_name])
    if torch.equal(model.through.loop.norm.weight.to(rounded_norm), rounded_norm):
        warnings.warn(
            f"{out}: so little was trained that its last norm is the target's, beside which its "
            "rows will not be refused; train longer, or at a higher rate",
            ForetellWarning,
            stacklevel=2,
        )
    merged_model.save_pretrained(out / "model")
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(out / "model")
    save_head(
        model.head, None, out / "head", target, metadata
    )  # its mark is that of the rounded norm
    write_text(out / "report.json", json.dumps(report, indent=1))
