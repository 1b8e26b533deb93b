"""What cannot be read ends in one line that names the field or the tensor, and says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretell
from foretell.errors import BadModel
from tests.models.quantized import writers

Q = "model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Any], writers.Tensors], None]


def setting(**fields: Any) -> Change:
    """Fields of quantization_config; None: taken out."""

    def change(settings: dict[str, Any], tensors: writers.Tensors) -> None:
        settings.update(fields)

    return change


def tensor(name: str, make: Callable[[torch.Tensor], Any]) -> Change:
    """A tensor of a layer made another; None: taken out."""

    def change(settings: dict[str, Any], tensors: writers.Tensors) -> None:
        made = make(tensors.pop(f"{Q}.{name}"))
        if made is not None:
            tensors[f"{Q}.{name}"] = made

    return change


def another_tensor(settings: dict[str, Any], tensors: writers.Tensors) -> None:
    tensors["model.layers.0.extra.weight"] = torch.ones(2)


def state(**fields: Any) -> Change:
    def change(old: torch.Tensor) -> torch.Tensor:
        text = json.dumps(json.loads(bytes(old.tolist())) | fields)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return tensor("weight.quant_state.bitsandbytes__nf4", change)


def with_nan(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values.view(torch.uint8).fill_(127)
    return values


def without(values: torch.Tensor) -> None:
    return None


BAD: list[tuple[str, Change, str]] = [
    ("gptq", setting(quant_method="hqq"), "quant_method is 'hqq', and must be one of awq, bits"),
    ("gptq", setting(quant_method=None), "quant_method is None"),
    ("gptq", setting(bits=5), "bits is 5, and must be one of 2, 3, 4, 8"),
    ("gptq", setting(bits=True), "bits is True"),
    ("gptq", setting(group_size=0), "group_size is 0"),
    ("gptq", setting(group_size="32"), "group_size is '32'"),
    ("gptq", setting(group_size=64), f"{Q}.scales is (2, 64) of float16"),
    ("gptq", setting(checkpoint_format="marlin"), "checkpoint_format is 'marlin', and must be"),
    ("gptq", setting(is_marlin_format=True), "is_marlin_format is True, and must be false"),
    ("gptq", setting(dynamic={"+:.*q_proj": {"bits": 8}}), "dynamic is "),
    ("gptq", tensor("qzeros", without), f"it lacks {Q}.qzeros"),
    ("gptq", tensor("qweight", lambda w: w[:-1]), f"{Q}.qweight is (7, 64) of int32, and config"),
    ("gptq", tensor("qweight", torch.Tensor.float), "of float32, and config.json asks for (8, 64)"),
    ("gptq", tensor("scales", with_nan), f"{Q}.scales has numbers that are not finite"),
    (
        "gptq",
        tensor("g_idx", torch.zeros_like),
        f"{Q}.g_idx puts other than 32 inputs into a group",
    ),
    ("gptq", tensor("g_idx", lambda g: g - 1), f"{Q}.g_idx puts other than 32 inputs"),
    ("gptq", tensor("bias", torch.ones_like), f"it has {Q}.bias, which are unknown here"),
    ("gptq", another_tensor, "it has model.layers.0.extra.weight, which are unknown"),
    ("awq", setting(version="gemv"), "version is 'gemv', and must be gemm"),
    ("awq", setting(bits=8), "bits is 8, and must be one of 4"),
    ("awq", tensor("qzeros", lambda z: z.t().contiguous()), f"{Q}.qzeros is (8, 1) of int32"),
    ("compressed-tensors", setting(format="marlin-24"), "format is 'marlin-24'"),
    (
        "compressed-tensors",
        setting(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_con",
    ),
    ("compressed-tensors", setting(transform_config={"config_groups": {}}), "transform_config is"),
    ("compressed-tensors", setting(config_groups=[]), "config_groups is [], and must be an object"),
    ("compressed-tensors", setting(config_groups={}), "which is no scale for each group"),
    ("compressed-tensors", tensor("weight_shape", torch.zeros_like), "weight_shape is (0, 0)"),
    ("compressed-tensors", tensor("weight_packed", lambda w: w[:, :-1].clone()), "is no (64, 64)"),
    ("compressed-tensors nvfp4", tensor("weight_global_scale", torch.zeros_like), "not finite"),
    ("compressed-tensors nvfp4", tensor("weight_scale", torch.Tensor.float), "of float8_e4m3fn"),
    ("bitsandbytes nf4", state(shape=[64, 32]), "says [64, 32], and config.json (64, 64)"),
    ("bitsandbytes nf4", state(blocksize=-64), "has blocksize=-64, which is no number of inputs"),
    ("bitsandbytes nf4", state(blocksize=128), "its blocks of 128 go on in the next row"),
    ("bitsandbytes nf4", tensor("weight.quant_map", lambda t: t[:8].clone()), "quant_map is (8,)"),
    ("bitsandbytes nf4, nested", state(nested_offset="0"), "has nested_offset='0'"),
    ("bitsandbytes nf4, nested", state(nested_blocksize=0), "has nested_blocksize=0"),
    ("fp8", setting(weight_block_size=[0, 64]), "weight_block_size is [0, 64], and must be two"),
    ("fp8", setting(weight_block_size=None), "which is no scale for each block"),
    ("fp8", tensor("weight", with_nan), f"{Q}.weight has numbers that are none"),
]


@pytest.mark.parametrize("name, change, says", BAD)
def test_it_is_one_line(name: str, change: Change, says: str, tmp_path: Path) -> None:
    writers.write_folder(writers.CASES[name], tmp_path, writers.model_of(num_hidden_layers=1))
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    tensors = load_file(tmp_path / "model.safetensors")
    change(config["quantization_config"], tensors)
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, tmp_path / "model.safetensors")
    line = refusal(tmp_path)
    assert says in line and str(tmp_path) in line


def refusal(folder: Path) -> str:
    with pytest.raises(BadModel) as refused:
        foretell.load(folder)
    line = str(refused.value)
    cures = ("dtype='int8'", "take quantization_config", "fetch it again")
    assert "\n" not in line and any(cure in line for cure in cures)
    return line


def test_groups_that_no_kernel_takes(tmp_path: Path) -> None:
    writers.write_folder(writers.gptq(4, 16), tmp_path, writers.model_of(num_hidden_layers=1))
    assert "its groups of 16 share no size with 32, 64, 128, 256" in refusal(tmp_path)


def test_scales_of_powers_that_are_no_numbers(tmp_path: Path) -> None:
    writers.write_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name][0, 0, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    assert f"{name} has scales that are no numbers" in refusal(tmp_path)


def test_a_model_without_any_such_matrix(tmp_path: Path) -> None:
    hf = writers.model_of(num_hidden_layers=1)
    writers.save(hf, writers.CASES["gptq"].settings, hf.state_dict(), tmp_path)
    assert "config.json says gptq, and no matrix is of it" in refusal(tmp_path)


def test_two_files_with_one_tensor(tmp_path: Path) -> None:
    writers.write_folder(writers.CASES["gptq"], tmp_path, writers.model_of(num_hidden_layers=1))
    save_file({f"{Q}.scales": torch.ones(2)}, tmp_path / "more.safetensors")
    assert f"more.safetensors has {Q}.scales, which another file has too" in refusal(tmp_path)


@pytest.mark.parametrize("contents", ["[]", "{", '"gptq"'])
def test_settings_that_are_no_object(contents: str, tmp_path: Path) -> None:
    writers.write_folder(writers.CASES["gptq"], tmp_path, writers.model_of(num_hidden_layers=1))
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    settings = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "quantize_config.json").write_text(contents, "utf-8")
    assert "quantize_config.json" in refusal(tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings), "utf-8")
    assert foretell.load(tmp_path).models["target"].vocab > 0
