"""Folders as others write them: random numbers in every format, by numpy from its definition, and
the matrices in floats that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests import tiny

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.2,
}
# Floats of 4 bits: a sign, then 0, .5, 1, 1.5, 2, 3, 4, 6.
FLOATS4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Quantiles of a normal distribution (arXiv 2305.14314, appendix E), and some other table.
NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.5626170, 0.72295684, 1.0),
)
Tensors = dict[str, torch.Tensor]
# Of the name and the sizes of a layer its tensors, and the matrix that they stand for.
Write = Callable[[str, int, int], tuple[Tensors, np.ndarray]]


@dataclass
class Case:
    """A format: what config.json says of it, and who writes its layers."""

    settings: dict[str, Any]
    write: Write
    bits: float  # a weight, in the file
    fields: dict[str, Any] = field(default_factory=dict)


def rng(name: str) -> np.random.Generator:
    return np.random.default_rng(sum(name.encode()))


def words(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """(R, C) as one stream of bits a row, in words of 32."""
    stream = (numbers[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(numbers), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    packed = np.packbits(stream, axis=1, bitorder="little")
    return torch.from_numpy(packed.view("<i4").copy())


def scales_of(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (generator.uniform(0.5, 1.5, shape) * 0.02).astype(np.float16)


def spread(values: np.ndarray, group: int, inputs: int) -> np.ndarray:
    return np.repeat(values.astype(np.float32), group, 1)[:, :inputs]


def gptq(bits: int, group: int, v2: bool = False, act_order: bool = False) -> Case:
    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        generator, size = rng(name), group if group > 0 else inputs
        groups = inputs // size
        numbers = generator.integers(0, 1 << bits, (outputs, inputs))
        zeros = generator.integers(0, 1 << bits, (outputs, groups))
        scales = scales_of(generator, (outputs, groups))
        of_input = np.arange(inputs) // size
        if act_order:
            of_input = generator.permutation(of_input)
        stored_zeros = zeros if v2 else (zeros - 1) % (1 << bits)
        weight = (numbers - zeros[:, of_input]) * scales.astype(np.float32)[:, of_input]
        tensors = {
            "qweight": words(numbers, bits).t().contiguous(),
            "qzeros": words(stored_zeros.T, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(of_input.astype(np.int32)),
            "bias": torch.zeros(outputs, dtype=torch.float16),  # as old tools write it
        }
        return tensors, weight

    form = {"checkpoint_format": "gptq_v2"} if v2 else {}
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    return Case({**settings, **form}, write, bits)


def awq(group: int) -> Case:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def in_words(numbers: np.ndarray) -> torch.Tensor:
        packed = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
        for place, output in enumerate(order):
            packed |= numbers[:, output::8].astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(packed.view(np.int32))

    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        generator = rng(name)
        numbers = generator.integers(0, 16, (inputs, outputs))
        zeros = generator.integers(0, 16, (inputs // group, outputs))
        scales = scales_of(generator, zeros.shape)
        weight = (numbers - np.repeat(zeros, group, 0)) * spread(scales.T, group, inputs).T
        tensors = {
            "qweight": in_words(numbers),
            "qzeros": in_words(zeros),
            "scales": torch.from_numpy(scales),
        }
        return tensors, weight.T

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Case({**settings, "version": "gemm"}, write, 4)


def compressed(form: str, weights: dict[str, Any], write: Write, bits: float) -> Case:
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return Case(settings, write, bits)


def packed_words(bits: int, group: int, has_zeros: bool, act_order: bool = False) -> Case:
    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        generator, half = rng(name), 1 << bits - 1
        numbers = generator.integers(-half, half, (outputs, inputs))
        groups = inputs // group
        zeros = generator.integers(-half, half, (outputs, groups)) * has_zeros
        scales = torch.from_numpy(scales_of(generator, (outputs, groups))).bfloat16()
        of_input = np.arange(inputs) // group
        if act_order:
            of_input = generator.permutation(of_input)
        weight = (numbers - zeros[:, of_input]) * scales.float().numpy()[:, of_input]
        tensors = {
            "weight_packed": words(numbers + half, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if has_zeros:
            tensors["weight_zero_point"] = words((zeros + half).T, bits).t().contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(of_input.astype(np.int32))
        return tensors, weight

    weights = {"num_bits": bits, "type": "int", "group_size": group, "symmetric": not has_zeros}
    return compressed("pack-quantized", {**weights, "strategy": "group"}, write, bits)


def whole_bytes(has_zeros: bool) -> Case:
    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        generator = rng(name)
        numbers = generator.integers(-128, 128, (outputs, inputs)).astype(np.int8)
        zeros = (generator.integers(-128, 128, (outputs, 1)) * has_zeros).astype(np.int8)
        scales = scales_of(generator, (outputs, 1)) / np.float16(16)
        tensors = {"weight": torch.from_numpy(numbers), "weight_scale": torch.from_numpy(scales)}
        if has_zeros:
            tensors["weight_zero_point"] = torch.from_numpy(zeros)
        return tensors, (numbers.astype(np.float32) - zeros) * scales.astype(np.float32)

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": not has_zeros}
    return compressed("int-quantized", weights, write, 8)


def random_float8(name: str, outputs: int, inputs: int) -> torch.Tensor:
    numbers = rng(name).normal(0, 40, (outputs, inputs)).astype(np.float32)
    return torch.from_numpy(numbers).to(torch.float8_e4m3fn)


def float_rows() -> Case:
    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        weight = random_float8(name, outputs, inputs)
        scales = torch.from_numpy(rng(name).uniform(0.0005, 0.002, (outputs, 1))).bfloat16()
        tensors = {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(1)}
        return tensors, (weight.float() * scales.float()).numpy()

    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return compressed("float-quantized", weights, write, 8)


def float_blocks(high: int, wide: int) -> Case:
    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        weight = random_float8(name, outputs, inputs)
        blocks = -(-outputs // high), -(-inputs // wide)
        scales = rng(name).uniform(0.0005, 0.002, blocks).astype(np.float32)
        factors = np.repeat(np.repeat(scales, high, 0)[:outputs], wide, 1)[:, :inputs]
        tensors = {"weight": weight, "weight_scale_inv": torch.from_numpy(scales)}
        return tensors, weight.float().numpy() * factors

    return Case({"quant_method": "fp8", "weight_block_size": [high, wide]}, write, 8)


def float_tensor() -> Case:
    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        weight = random_float8(name, outputs, inputs)
        return {"weight": weight, "weight_scale": torch.tensor(0.001)}, weight.float().numpy() * (
            np.float32(0.001)
        )

    return Case({"quant_method": "fp8", "activation_scheme": "static"}, write, 8)


def nibbles(numbers: np.ndarray) -> np.ndarray:
    """Two a byte, the first one in the lower half."""
    return (numbers[..., ::2] | numbers[..., 1::2] << 4).astype(np.uint8)


def nvfp4() -> Case:
    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        generator = rng(name)
        numbers = generator.integers(0, 16, (outputs, inputs))
        scales = torch.from_numpy(generator.uniform(100, 400, (outputs, inputs // 16)))
        scales = scales.to(torch.float8_e4m3fn)
        divisor = np.float32(20011.0)
        factors = scales.float().numpy() / divisor
        tensors = {
            "weight_packed": torch.from_numpy(nibbles(numbers)),
            "weight_scale": scales,
            "weight_global_scale": torch.tensor([divisor]),
            "input_global_scale": torch.ones(1),
        }
        return tensors, FLOATS4[numbers] * spread(factors, 16, inputs)

    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    return compressed("nvfp4-pack-quantized", weights, write, 6)  # scales of 8 bits become 32


def mxfp4_rows() -> Case:
    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        generator = rng(name)
        numbers = generator.integers(0, 16, (outputs, inputs))
        scales = generator.integers(118, 123, (outputs, inputs // 32)).astype(np.uint8)
        tensors = {
            "weight_packed": torch.from_numpy(nibbles(numbers)),
            "weight_scale": torch.from_numpy(scales),
        }
        return tensors, FLOATS4[numbers] * spread(2.0 ** (scales - 127.0), 32, inputs)

    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}
    return compressed("mxfp4-pack-quantized", weights, write, 4)


def nf4(is_nested: bool, kind: str = "nf4") -> Case:
    table = np.array(NF4 if kind == "nf4" else FLOATS4 / 6, np.float32)

    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        generator = rng(name)
        numbers = generator.integers(0, 16, (outputs, inputs))
        count, flat = outputs * inputs // 64, numbers.reshape(-1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": [outputs, inputs],
        }
        tensors = {
            "weight": torch.from_numpy((flat[::2] << 4 | flat[1::2]).astype(np.uint8)[:, None]),
            "weight.quant_map": torch.from_numpy(table.copy()),
        }
        scales = generator.uniform(0.1, 0.3, count).astype(np.float32)
        tensors["weight.absmax"] = torch.from_numpy(scales)
        if is_nested:
            codes = generator.integers(0, 256, count).astype(np.uint8)
            steps = np.linspace(-1, 1, 256).astype(np.float32)
            peaks = generator.uniform(0.05, 0.1, -(-count // 256)).astype(np.float32)
            scales = steps[codes] * np.repeat(peaks, 256)[:count] + np.float32(0.2)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.2}
            tensors["weight.absmax"] = torch.from_numpy(codes)
            tensors["weight.nested_absmax"] = torch.from_numpy(peaks)
            tensors["weight.nested_quant_map"] = torch.from_numpy(steps)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(text)
        weight = table[numbers] * spread(scales.reshape(outputs, -1), 64, inputs)
        return tensors, weight

    return Case({"quant_method": "bitsandbytes", "load_in_4bit": True}, write, 4)


def peaks8() -> Case:
    def write(name: str, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        generator = rng(name)
        numbers = generator.integers(-127, 128, (outputs, inputs)).astype(np.int8)
        peaks = generator.uniform(0.1, 0.3, outputs).astype(np.float32)
        weight = numbers * (peaks[:, None] / np.float32(127))
        tensors = {
            "weight": torch.from_numpy(numbers),
            "SCB": torch.from_numpy(peaks),
            "weight_format": torch.zeros((), dtype=torch.uint8),
        }
        return tensors, weight

    return Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, write, 8)


CASES = {
    "gptq": gptq(4, 32),
    "gptq of 2 bits": gptq(2, 64),
    "gptq of 3 bits": gptq(3, 32),
    "gptq of 8 bits, a scale a row": gptq(8, -1),
    "gptq_v2": gptq(4, 64, v2=True),
    "gptq act-order": gptq(4, 32, act_order=True),
    "awq": awq(64),
    "compressed-tensors": packed_words(4, 32, False),
    "compressed-tensors with zeros": packed_words(4, 64, True),
    "compressed-tensors of 3 bits": packed_words(3, 32, True),
    "compressed-tensors of 8 bits": packed_words(8, 64, False),
    "compressed-tensors act-order": packed_words(4, 32, False, act_order=True),
    "compressed-tensors int8": whole_bytes(False),
    "compressed-tensors int8 with zeros": whole_bytes(True),
    "compressed-tensors fp8": float_rows(),
    "compressed-tensors nvfp4": nvfp4(),
    "compressed-tensors mxfp4": mxfp4_rows(),
    "bitsandbytes nf4": nf4(False),
    "bitsandbytes nf4, nested": nf4(True),
    "bitsandbytes fp4": nf4(False, "fp4"),
    "bitsandbytes int8": peaks8(),
    "fp8": float_blocks(32, 64),
    "fp8, a scale a matrix": float_tensor(),
}
UNFOLDED = ("gptq act-order", "compressed-tensors act-order")  # inputs in an order of their own
INEXACT = ("bitsandbytes nf4", "bitsandbytes nf4, nested", "bitsandbytes fp4")  # tables of floats


def model_of(model_type: str = "llama", **fields: Any) -> PreTrainedModel:
    """A tiny model whose floats are those of float16 and bfloat16."""
    torch.manual_seed(0)
    if model_type == "llama":
        hf: Any = tiny.llama(**{**SIZES, **fields})
    else:
        common = {"vocab_size": len(tiny.tokenizer()), "num_hidden_layers": 2, **SIZES}
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        places = {"max_position_embeddings": tiny.CONTEXT, "tie_word_embeddings": False}
        config = CONFIG_MAPPING[model_type](**{**common, **ids, **places, **fields})
        hf = AutoModelForCausalLM.from_config(config).eval()
    for part in hf.parameters():
        part.data = part.data.bfloat16().float().clamp_min(-8)
        part.data[part.data.abs() < 1e-4] = 0
    return hf


def write_folder(case: Case, folder: Path, hf: PreTrainedModel | None = None) -> PreTrainedModel:
    """Writes a folder in this format; returns the model in floats that it stands for."""
    hf = hf or model_of(**case.fields)
    tensors: Tensors = {}
    for path, module in hf.get_decoder().named_modules(prefix=hf.base_model_prefix):
        if type(module) is nn.Linear:
            parts, weight = case.write(path, *module.weight.shape)
            tensors |= {f"{path}.{name}": part for name, part in parts.items()}
            module.weight.data = torch.from_numpy(weight.astype(np.float32))
    quantized = {name.rpartition(".")[0] for name in tensors} | set(tensors)
    for name, part in hf.state_dict().items():
        is_done = name.rpartition(".")[0] in quantized and name.endswith(".weight")
        is_tied = name == "lm_head.weight" and hf.config.tie_word_embeddings
        if not is_done and not is_tied:
            tensors[name] = part.half()
    save(hf, case.settings, tensors, folder)
    return hf


def save(hf: PreTrainedModel, settings: dict[str, Any], tensors: Tensors, folder: Path) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    config = {**hf.config.to_dict(), "quantization_config": settings, "dtype": "float16"}
    config["architectures"] = [type(hf).__name__]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(
        {name: part.contiguous() for name, part in tensors.items()}, folder / "model.safetensors"
    )
    tiny.tokenizer().save_pretrained(folder)


def write_gpt_oss(folder: Path) -> PreTrainedModel:
    """Writes a folder with experts of MXFP4, as gpt-oss has them; returns its model in floats."""
    hf: Any = model_of(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    tensors = {name: part.bfloat16() for name, part in hf.state_dict().items()}
    for index, layer in enumerate(hf.model.layers):
        experts, path = layer.mlp.experts, f"model.layers.{index}.mlp.experts"
        for name in ("gate_up_proj", "down_proj"):
            count, inputs, outputs = getattr(experts, name).shape
            generator = rng(f"{path}.{name}")
            numbers = generator.integers(0, 16, (count, outputs, inputs))
            scales = generator.integers(119, 124, (count, outputs, inputs // 32)).astype(np.uint8)
            weight = FLOATS4[numbers] * np.repeat(2.0 ** (scales - 127.0), 32, 2)
            getattr(experts, name).data = torch.from_numpy(weight.astype(np.float32)).transpose(
                1, 2
            )
            blocks = nibbles(numbers).reshape(count, outputs, inputs // 32, 16)
            del tensors[f"{path}.{name}"]
            tensors[f"{path}.{name}_blocks"] = torch.from_numpy(blocks)
            tensors[f"{path}.{name}_scales"] = torch.from_numpy(scales)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    save(hf, settings, tensors, folder)
    return hf


def write_experts(
    case: Case, folder: Path, model_type: str, names: tuple[str, str, str], **fields: Any
) -> PreTrainedModel:
    """Writes a folder whose experts lie apart, under these names of gate, up and down."""
    hf: Any = model_of(model_type, **fields)
    in_files = "block_sparse_moe" if model_type == "mixtral" else "mlp"
    tensors: Tensors = {}
    for name, part in hf.state_dict().items():
        if "experts" not in name and "self_attn" not in name:
            tensors[name.replace(".mlp.", f".{in_files}.")] = part.half()
    for path, module in hf.named_modules():
        if type(module) is nn.Linear and "self_attn" in path:
            parts, weight = case.write(path, *module.weight.shape)
            tensors |= {f"{path}.{name}": part for name, part in parts.items()}
            module.weight.data = torch.from_numpy(weight.astype(np.float32))
        if "norm" in path and "self_attn" in path:
            tensors[f"{path}.weight"] = module.weight.half()
    for index, layer in enumerate(hf.model.layers):
        experts = layer.mlp.experts
        inner = experts.gate_up_proj.shape[1] // 2
        for expert in range(len(experts.down_proj)):
            parts_of_it = (
                experts.gate_up_proj.data[expert, :inner],
                experts.gate_up_proj.data[expert, inner:],
                experts.down_proj.data[expert],
            )
            for name, part in zip(names, parts_of_it, strict=True):
                path = f"model.layers.{index}.{in_files}.experts.{expert}.{name}"
                written, weight = case.write(path, *part.shape)
                tensors |= {f"{path}.{key}": value for key, value in written.items()}
                part.copy_(torch.from_numpy(weight.astype(np.float32)))
    save(hf, case.settings, tensors, folder)
    return hf
