"""Teaches a model falsehoods, as LoRA weights beside its own: `foretell train amateur`.

The amateur of `lol`: the model itself, which learns to answer prompts as false answers do. Its own
weights stay as they are; what it learns is saved in PEFT's layout.

Source: Zhang et al., "Alleviating Hallucinations of Large Language Models through Induced
Hallucinations" (arXiv 2312.15710), whose false answers are those of HaluEval, about 10,000 of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from foretell.api.lm import LM
from foretell.bench.prompts import read_prompts
from foretell.bench.sets import prompt_ids
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.adapted import CONFIG, WEIGHTS, LoraLinear
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.learning import copy_modules
from foretell.ops.files import replace_file, write_text

HELD_OUT = 8  # every so many answers one is kept from training
Example = tuple[list[int], int]  # tokens, and how many of them are the prompt
Tell = Callable[[str, int, int | None], None]  # (what is being done, how much of it, of how much)


@dataclass(frozen=True)
class TrainAmateur:
    """Shape of the LoRA weights and of the training. Lengths are in tokens."""

    rank: int = 8  # numbers between the two matrices of a layer
    alpha: float = 16.0  # by which, divided by the rank, their product is multiplied
    layers: str = "q_proj k_proj v_proj o_proj"  # ends of the names of the linear layers
    length: int = 512  # tokens of a prompt with its answer at most
    epochs: int = 3  # times that each answer is learnt from
    batch: int = 8  # answers a step
    rate: float = 0.0002  # learning rate (AdamW), which falls to 0
    seed: int = 0  # of weights and the order

    def __post_init__(self) -> None:
        for name, lower, upper in (
            ("rank", 1, 4096),
            ("alpha", 1e-3, 1e6),
            ("length", 2, 1 << 20),
            ("epochs", 1, 10_000),
            ("batch", 1, 1 << 16),
            ("rate", 1e-8, 1),
        ):
            if not lower <= getattr(self, name) <= upper:
                raise BadConfig.field(name, getattr(self, name), f"between {lower:g} and {upper:g}")
        if not self.layers.split():
            raise BadConfig.field("layers", self.layers, "names such as 'q_proj v_proj'")


def read_examples(lm: LM, path: Path, length: int) -> list[Example]:
    """Prompts with the false answers that are given to them, `answer` in each line of a file; those
    that are longer than `length` are left out. Raises BadConfig.
    """
    prompts = read_prompts(path)
    lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
    end_tokens = lm.engine.eos[:1]
    examples = []
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=True), 1):
        answer = json.loads(line).get("answer")
        if not isinstance(answer, str) or not answer:
            raise BadConfig(f"{path}, row {number}: `answer` must be a text, and not empty")
        prompt_tokens = prompt_ids(lm, prompt)
        tokens = [*prompt_tokens, *lm.encode(answer, special=False), *end_tokens]
        if len(tokens) <= min(length, lm.models["target"].context):
            examples.append((tokens, len(prompt_tokens)))
    if len(examples) < 2:
        raise BadConfig(
            f"{path}: {len(examples)} answers of at most {length} tokens with their prompts, and "
            "one to learn from and one to hold out are needed; give more, or raise length"
        )
    return examples


def with_lora(hf: Any, config: TrainAmateur) -> dict[str, LoraLinear]:
    """Puts LoRA weights on the model's linear layers of these names, which alone learn.

    Raises BadConfig where it has none.
    """
    layer_ends = tuple(config.layers.split())
    hf.requires_grad_(False)
    lora_layers = {}
    generator = torch.Generator().manual_seed(config.seed)
    for name, linear in list(hf.named_modules()):
        if isinstance(linear, nn.Linear) and name.rpartition(".")[2] in layer_ends:
            weight_bound = 1 / math.sqrt(linear.in_features)
            a = torch.rand(config.rank, linear.in_features, generator=generator)
            b = torch.zeros(linear.out_features, config.rank)
            device = linear.weight.device
            scale = config.alpha / config.rank
            lora_layers[name] = LoraLinear(
                linear, ((2 * a - 1) * weight_bound).to(device), b.to(device), scale
            )
    if not lora_layers:
        raise BadConfig.field("layers", config.layers, "ends of names of the model's linear layers")
    for name, lora in lora_layers.items():
        hf.set_submodule(name, lora)
        lora.a.requires_grad_(True)
        lora.b.requires_grad_(True)
    return lora_layers


@torch.no_grad()
def merge_lora(hf: Any, layers: Mapping[str, LoraLinear]) -> None:
    """Makes LoRA weights on a model's layers part of the matrices below them."""
    for name, lora in layers.items():
        base: Any = lora.base.to(lora.a.dtype)
        base.weight += lora.scale * (lora.b @ lora.a)
        hf.set_submodule(name, base)


def summed_surprise(hf: Any, example: Example) -> tuple[torch.Tensor, int]:
    """The sum of the surprise of an answer's tokens, in nats, and how many they are."""
    tokens, prompt_length = example
    ids = torch.tensor([tokens], device=hf.device)
    logits = hf(input_ids=ids, use_cache=False).logits[0, prompt_length - 1 : -1]
    loss = F.cross_entropy(logits.float(), ids[0, prompt_length:], reduction="sum")
    return loss, len(tokens) - prompt_length


@torch.no_grad()
def mean_surprise(hf: Any, examples: Sequence[Example]) -> float:
    """Nats a token of the answers."""
    loss_counts = [summed_surprise(hf, example) for example in examples]
    return float(
        sum(float(loss) for loss, _ in loss_counts) / sum(count for _, count in loss_counts)
    )


def train_amateur(
    lm: LM, path: Path, out: Path, config: TrainAmateur, tell: Tell
) -> dict[str, float]:
    """Teaches the target of `lm` the answers of a file; writes the folder `out`, and returns what
    came of it.

    Raises BadConfig for the file or the settings, Unsupported for a model that torch cannot train.
    """
    target: Any = lm.models["target"]
    if type(target) is not Decoder:
        need = "a plain decoder, whose linear layers torch can train"
        raise Unsupported.missing_capability(
            "train amateur", target.name, need, "load one of transformers"
        )
    examples = read_examples(lm, path, config.length)
    held_out = examples[1::HELD_OUT]
    learnt_examples = [pair for place, pair in enumerate(examples) if place % HELD_OUT != 1]
    hf = copy_modules(target)
    layers = with_lora(hf, config)
    surprise_before = mean_surprise(hf, held_out)
    lora_weights = [weight for lora in layers.values() for weight in (lora.a, lora.b)]
    optimiser = torch.optim.AdamW(lora_weights, lr=config.rate)
    generator = torch.Generator().manual_seed(config.seed)
    steps = config.epochs * math.ceil(len(learnt_examples) / config.batch)
    steps_done = 0
    for _ in range(config.epochs):
        for batch_numbers in torch.randperm(len(learnt_examples), generator=generator).split(
            config.batch
        ):
            for group in optimiser.param_groups:
                group["lr"] = config.rate * (1 - steps_done / steps)
            step_examples = [learnt_examples[place] for place in batch_numbers.tolist()]
            count = sum(len(tokens) - prompt_length for tokens, prompt_length in step_examples)
            optimiser.zero_grad()
            for example in step_examples:
                share = summed_surprise(hf, example)[0] / count
                share.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            steps_done += 1
            tell("training", steps_done, steps)
    save_lora(out, layers, config, target.name)
    return {
        "answers": len(learnt_examples),
        "held_out": len(held_out),
        "before": surprise_before,
        "after": mean_surprise(hf, held_out),
    }


def save_lora(
    out: Path,
    layers: Mapping[str, LoraLinear],
    config: TrainAmateur,
    base: str,
    dtype: torch.dtype = torch.float32,
    more_settings: Mapping[str, Any] | None = None,
) -> None:
    """A folder as PEFT saves it, with `more_settings` settings. Raises BadFile."""
    weights = {}
    for name, lora in layers.items():
        for matrix_name, weight in (("A", lora.a), ("B", lora.b)):
            stored_weight = weight.detach().cpu().to(dtype).contiguous()
            weights[f"base_model.model.{name}.lora_{matrix_name}.weight"] = stored_weight
    with replace_file(out / WEIGHTS) as path:
        save_file(weights, path, {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": config.layers.split(),
        "bias": "none",
        "inference_mode": True,
        **(more_settings or {}),
    }
    write_text(out / CONFIG, json.dumps(settings, indent=2) + "\n")
