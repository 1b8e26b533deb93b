"""A decoder with LoRA weights of a folder in PEFT's layout, which shares its own weights.

Linear layers that the folder names add a low-rank product of their input: base(x) + scale B A x.
The modules are copied, their weights are not: both models read the same memory, and the target
stays as it is. torch computes it, whatever computes the target.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685); PEFT's
files adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

from foretell.core.model import Model
from foretell.errors import BadModel, Unsupported, first_line
from foretell.models.decoder.packed import PackedLinear
from foretell.ops.parsing import json_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")
PLAIN: dict[str, tuple[Any, ...]] = {  # values of settings that ask for nothing else
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
}


class LoraLinear(nn.Module):
    """`base` with what `a` (r, in) and `b` (out, r) add, `scale` times."""

    def __init__(self, base: nn.Module, a: torch.Tensor, b: torch.Tensor, scale: float):
        super().__init__()
        self.base = base
        self.in_features, self.out_features = a.shape[1], b.shape[0]
        self.a = nn.Parameter(a, requires_grad=False)
        self.b = nn.Parameter(b, requires_grad=False)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        if not torch.is_autocast_enabled(x.device.type):  # which sees to it by itself
            x = x.to(self.a)
        added = F.linear(F.linear(x, self.a), self.b)
        return y + (self.scale * added).to(y)


def adapted(base: Any, kind: type[Any], folder: str) -> Model:
    """The decoder `base`, of class `kind`, with the folder's LoRA weights. Raises BadModel for the
    folder, Unsupported for the decoder.
    """
    if type(base) is not kind:
        need = "the linear layers of a plain decoder, which LoRA weights are added to"
        raise Unsupported.missing("a LoRA folder", base.name, need, "give a whole model by name")
    path = Path(folder).expanduser()
    hf = shared(base.hf)
    wide = torch.float64 if base.dtype == torch.float64 else torch.float32
    for name, linear, (a, b), scale in added(hf, path, base.name):
        if name in getattr(base.hf, "smoothed", {}):  # its input is not the one they learnt from
            a = a * base.hf.smoothed[name].to(a)
        lora = LoraLinear(linear, a.to(base.device, wide), b.to(base.device, wide), scale)
        hf.set_submodule(name, lora)
    model: Model = kind(hf, f"{base.name}[{path.name}]")
    model.tokenizer = base.tokenizer
    model.threads_wanted = base.threads_wanted
    return model


def added(
    hf: nn.Module, path: Path, title: str
) -> Iterator[tuple[str, Any, tuple[torch.Tensor, torch.Tensor], float]]:
    """Of each linear layer that a folder adds to: its name, itself, (A, B) and what their product
    is multiplied by. Raises BadModel where the model `title` has no such layer.
    """
    settings = read_settings(path / CONFIG)
    for name, (a, b) in _pairs(path / WEIGHTS).items():
        try:
            linear: Any = hf.get_submodule(name)
        except AttributeError:
            linear = None
        if not isinstance(linear, nn.Linear | PackedLinear):
            raise BadModel(
                f"{path / WEIGHTS}: {name} is no linear layer of {title}; "
                "give LoRA weights that were trained on this model"
            )
        sizes = (a.shape[1], b.shape[0], a.shape[0])
        if sizes != (linear.in_features, linear.out_features, b.shape[1]):
            raise BadModel(
                f"{path / WEIGHTS}: {name} has LoRA weights of another size; "
                "give some that were trained on this model"
            )
        yield name, linear, (a, b), scale_of(settings, name, a.shape[0])


@torch.no_grad()
def merge(hf: nn.Module, path: Path, title: str) -> None:
    """Makes a folder's LoRA weights part of a model's own, in float32. Raises BadModel."""
    for _, linear, (a, b), scale in added(hf, path, title):
        linear.weight += scale * (b.float() @ a.float())


def shared(module: nn.Module, made: dict[int, nn.Module] | None = None) -> nn.Module:
    """The same modules once more over the same weights, so that some can be replaced."""
    made = {} if made is None else made
    if id(module) not in made:
        twin = made[id(module)] = copy.copy(module)
        twin._modules = {
            name: None if child is None else shared(child, made)
            for name, child in module._modules.items()
        }
    return made[id(module)]


def scale_of(settings: Mapping[str, Any], name: str, rank: int) -> float:
    """What PEFT multiplies a module's product by."""
    alpha = settings.get("lora_alpha", 8)
    for pattern, other in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            alpha = other
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def read_settings(file: Path) -> dict[str, Any]:
    """Raises BadModel where it is not there, or says what is not computed here."""
    try:
        settings: Any = json_of(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(
            f"{file}: cannot be read ({first_line(error)}); give a folder of LoRA weights as PEFT "
            "saves them"
        ) from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise BadModel(f"{file}: does not describe LoRA weights; give a folder that PEFT saved")
    for name, plain in PLAIN.items():
        if settings.get(name) not in plain:
            raise BadModel(
                f"{file}: {name}={settings[name]!r} is not computed here; "
                "merge the weights into a model of their own, and give that by name"
            )
    return settings


def _pairs(file: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(A, B) of each module. Raises BadModel."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # no mapping
                match = KEY.fullmatch(key)
                if match is None:
                    raise BadModel(f"{file}: {key} is no LoRA weight of a linear layer; remove it")
                found.setdefault(match["module"], {})[match["part"]] = opened.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise BadModel(
            f"{file}: cannot be read ({first_line(error)}); PEFT saves it beside {CONFIG}"
        ) from error
    halves = [name for name, parts in found.items() if len(parts) < 2]
    if halves or not found:
        what = f"{halves[0]} lacks one of its two parts" if halves else "holds no weights"
        raise BadModel(f"{file}: {what}; save it again")
    return {name: (parts["A"], parts["B"]) for name, parts in found.items()}
