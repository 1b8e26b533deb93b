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
from foretell.errors import BadModel, Unsupported, first_message_line
from foretell.models.decoder.packed import PackedLinear
from foretell.ops.parsing import parse_json

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
        low_rank = F.linear(F.linear(x, self.a), self.b)
        return y + (self.scale * low_rank).to(y)


def adapt_decoder(base: Any, decoder_class: type[Any], folder: str) -> Model:
    """The decoder `base`, of class `decoder_class`, with the folder's LoRA weights. Raises BadModel
    for the folder, Unsupported for the decoder.
    """
    if type(base) is not decoder_class:
        need = "the linear layers of a plain decoder, which LoRA weights are added to"
        raise Unsupported.missing_capability(
            "a LoRA folder", base.name, need, "give a whole model by name"
        )
    folder_path = Path(folder).expanduser()
    hf_model = share_modules(base.hf)
    wide_dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    for layer_name, linear, (a, b), scale in added_layers(hf_model, folder_path, base.name):
        if layer_name in getattr(
            base.hf, "smoothed", {}
        ):  # its input is not the one they learnt from
            a = a * base.hf.smoothed[layer_name].to(a)
        lora_linear = LoraLinear(
            linear, a.to(base.device, wide_dtype), b.to(base.device, wide_dtype), scale
        )
        hf_model.set_submodule(layer_name, lora_linear)
    model: Model = decoder_class(hf_model, f"{base.name}[{folder_path.name}]")
    model.tokenizer = base.tokenizer
    model.threads_wanted = base.threads_wanted
    return model


def added_layers(
    hf_model: nn.Module, folder_path: Path, model_title: str
) -> Iterator[tuple[str, Any, tuple[torch.Tensor, torch.Tensor], float]]:
    """Yields, for each linear layer that a folder adds to, its name, the layer, (A, B) and the
    factor of their product. Raises BadModel where the model `model_title` has no such layer.
    """
    settings = read_settings(folder_path / CONFIG)
    for layer_name, (a, b) in _read_pairs(folder_path / WEIGHTS).items():
        try:
            linear: Any = hf_model.get_submodule(layer_name)
        except AttributeError:
            linear = None
        if not isinstance(linear, nn.Linear | PackedLinear):
            raise BadModel(
                f"{folder_path / WEIGHTS}: {layer_name} is no linear layer of {model_title}; "
                "give LoRA weights that were trained on this model"
            )
        sizes = (a.shape[1], b.shape[0], a.shape[0])
        if sizes != (linear.in_features, linear.out_features, b.shape[1]):
            raise BadModel(
                f"{folder_path / WEIGHTS}: {layer_name} has LoRA weights of another size; "
                "give some that were trained on this model"
            )
        yield layer_name, linear, (a, b), scale_of(settings, layer_name, a.shape[0])


@torch.no_grad()
def merge_adapter(hf_model: nn.Module, folder_path: Path, model_title: str) -> None:
    """Makes a folder's LoRA weights part of a model's own, in float32. Raises BadModel."""
    for _, linear, (a, b), scale in added_layers(hf_model, folder_path, model_title):
        linear.weight += scale * (b.float() @ a.float())


def share_modules(module: nn.Module, copies: dict[int, nn.Module] | None = None) -> nn.Module:
    """Copies modules over the same weights, so that some can be replaced."""
    copies = {} if copies is None else copies
    if id(module) not in copies:
        twin = copies[id(module)] = copy.copy(module)
        twin._modules = {
            child_name: None if child is None else share_modules(child, copies)
            for child_name, child in module._modules.items()
        }
    return copies[id(module)]


def scale_of(settings: Mapping[str, Any], layer_name: str, rank: int) -> float:
    """The factor by which PEFT multiplies a module's product."""
    alpha = settings.get("lora_alpha", 8)
    for pattern, layer_alpha in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer_name):
            alpha = layer_alpha
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def read_settings(config_file: Path) -> dict[str, Any]:
    """The settings of a folder of LoRA weights. Raises BadModel where the file is not there, or
    says what is not computed here.
    """
    try:
        settings: Any = parse_json(config_file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(
            f"{config_file}: cannot be read ({first_message_line(error)}); give a folder of LoRA "
            "weights as PEFT "
            "saves them"
        ) from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise BadModel(
            f"{config_file}: does not describe LoRA weights; give a folder that PEFT saved"
        )
    for setting, allowed_values in PLAIN.items():
        if settings.get(setting) not in allowed_values:
            raise BadModel(
                f"{config_file}: {setting}={settings[setting]!r} is not computed here; "
                "merge the weights into a model of their own, and give that by name"
            )
    return settings


def _read_pairs(weight_file: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The matrices (A, B) of each module, by its name. Raises BadModel."""
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(weight_file, "pt") as open_weights:
            for key in open_weights.keys():  # noqa: SIM118  # no mapping
                match = KEY.fullmatch(key)
                if match is None:
                    raise BadModel(
                        f"{weight_file}: {key} is no LoRA weight of a linear layer; remove it"
                    )
                matrices.setdefault(match["module"], {})[match["part"]] = open_weights.get_tensor(
                    key
                )
    except (OSError, SafetensorError) as error:
        raise BadModel(
            f"{weight_file}: cannot be read ({first_message_line(error)}); PEFT saves it beside "
            f"{CONFIG}"
        ) from error
    incomplete = [layer_name for layer_name, pair in matrices.items() if len(pair) < 2]
    if incomplete or not matrices:
        problem = (
            f"{incomplete[0]} lacks one of its two parts" if incomplete else "holds no weights"
        )
        raise BadModel(f"{weight_file}: {problem}; save it again")
    return {layer_name: (pair["A"], pair["B"]) for layer_name, pair in matrices.items()}
