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
from foretell.models.decoder.learning import copied
from foretell.ops.files import whole, write_text

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
        for name, low, high in (
            ("rank", 1, 4096),
            ("alpha", 1e-3, 1e6),
            ("length", 2, 1 << 20),
            ("epochs", 1, 10_000),
            ("batch", 1, 1 << 16),
            ("rate", 1e-8, 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(name, getattr(self, name), f"between {low:g} and {high:g}")
        if not self.layers.split():
            raise BadConfig.field("layers", self.layers, "names such as 'q_proj v_proj'")


def read_examples(lm: LM, path: Path, length: int) -> list[Example]:
    """Prompts with the false answers that are given to them, `answer` in each line of a file; those
    that are longer than `length` are left out. Raises BadConfig.
    """
    prompts = read_prompts(path)
    lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
    ends = lm.engine.eos[:1]
    found = []
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=True), 1):
        answer = json.loads(line).get("answer")
        if not isinstance(answer, str) or not answer:
            raise BadConfig(f"{path}, row {number}: `answer` must be a text, and not empty")
        asked = prompt_ids(lm, prompt)
        tokens = [*asked, *lm.encode(answer, special=False), *ends]
        if len(tokens) <= min(length, lm.models["target"].context):
            found.append((tokens, len(asked)))
    if len(found) < 2:
        raise BadConfig(
            f"{path}: {len(found)} answers of at most {length} tokens with their prompts, and one "
            "to learn from and one to hold out are needed; give more, or raise length"
        )
    return found


def with_lora(hf: Any, config: TrainAmateur) -> dict[str, LoraLinear]:
    """Puts LoRA weights on the model's linear layers of these names, which alone learn.

    Raises BadConfig where it has none.
    """
    ends = tuple(config.layers.split())
    hf.requires_grad_(False)
    found = {}
    generator = torch.Generator().manual_seed(config.seed)
    for name, linear in list(hf.named_modules()):
        if isinstance(linear, nn.Linear) and name.rpartition(".")[2] in ends:
            bound = 1 / math.sqrt(linear.in_features)
            a = torch.rand(config.rank, linear.in_features, generator=generator)
            b = torch.zeros(linear.out_features, config.rank)
            device = linear.weight.device
            scale = config.alpha / config.rank
            found[name] = LoraLinear(linear, ((2 * a - 1) * bound).to(device), b.to(device), scale)
    if not found:
        raise BadConfig.field("layers", config.layers, "ends of names of the model's linear layers")
    for name, lora in found.items():
        hf.set_submodule(name, lora)
        lora.a.requires_grad_(True)
        lora.b.requires_grad_(True)
    return found


@torch.no_grad()
def merge_lora(hf: Any, layers: Mapping[str, LoraLinear]) -> None:
    """Makes LoRA weights on a model's layers part of the matrices below them."""
    for name, lora in layers.items():
        base: Any = lora.base.to(lora.a.dtype)
        base.weight += lora.scale * (lora.b @ lora.a)
        hf.set_submodule(name, base)


def loss_of(hf: Any, example: Example) -> tuple[torch.Tensor, int]:
    """The sum of the surprise of an answer's tokens, in nats, and how many they are."""
    tokens, asked = example
    ids = torch.tensor([tokens], device=hf.device)
    logits = hf(input_ids=ids, use_cache=False).logits[0, asked - 1 : -1]
    loss = F.cross_entropy(logits.float(), ids[0, asked:], reduction="sum")
    return loss, len(tokens) - asked


@torch.no_grad()
def surprise(hf: Any, examples: Sequence[Example]) -> float:
    """Nats a token of the answers."""
    pairs = [loss_of(hf, example) for example in examples]
    return float(sum(float(loss) for loss, _ in pairs) / sum(count for _, count in pairs))


def train(lm: LM, path: Path, out: Path, config: TrainAmateur, tell: Tell) -> dict[str, float]:
    """Teaches the target of `lm` the answers of a file; writes the folder `out`, and returns what
    came of it.

    Raises BadConfig for the file or the settings, Unsupported for a model that torch cannot train.
    """
    target: Any = lm.models["target"]
    if type(target) is not Decoder:
        need = "a plain decoder, whose linear layers torch can train"
        raise Unsupported.missing("train amateur", target.name, need, "load one of transformers")
    examples = read_examples(lm, path, config.length)
    held_out = examples[1::HELD_OUT]
    learnt = [one for place, one in enumerate(examples) if place % HELD_OUT != 1]
    hf = copied(target)
    layers = with_lora(hf, config)
    before = surprise(hf, held_out)
    weights = [weight for lora in layers.values() for weight in (lora.a, lora.b)]
    optimiser = torch.optim.AdamW(weights, lr=config.rate)
    generator = torch.Generator().manual_seed(config.seed)
    steps = config.epochs * math.ceil(len(learnt) / config.batch)
    done = 0
    for _ in range(config.epochs):
        for chosen in torch.randperm(len(learnt), generator=generator).split(config.batch):
            for group in optimiser.param_groups:
                group["lr"] = config.rate * (1 - done / steps)
            batch = [learnt[place] for place in chosen.tolist()]
            count = sum(len(tokens) - asked for tokens, asked in batch)
            optimiser.zero_grad()
            for example in batch:
                (loss_of(hf, example)[0] / count).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            done += 1
            tell("training", done, steps)
    save(out, layers, config, target.name)
    return {
        "answers": len(learnt),
        "held_out": len(held_out),
        "before": before,
        "after": surprise(hf, held_out),
    }


def save(
    out: Path,
    layers: Mapping[str, LoraLinear],
    config: TrainAmateur,
    base: str,
    dtype: torch.dtype = torch.float32,
    more: Mapping[str, Any] | None = None,
) -> None:
    """A folder as PEFT saves it, with `more` settings. Raises BadFile."""
    weights = {}
    for name, lora in layers.items():
        for part, weight in (("A", lora.a), ("B", lora.b)):
            own = weight.detach().cpu().to(dtype).contiguous()
            weights[f"base_model.model.{name}.lora_{part}.weight"] = own
    with whole(out / WEIGHTS) as path:
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
        **(more or {}),
    }
    write_text(out / CONFIG, json.dumps(settings, indent=2) + "\n")
