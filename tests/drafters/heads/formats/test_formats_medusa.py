"""Medusa heads as their authors publish them, against their computation written plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.drafters.heads.formats.reading import check_taps, list_formats, load_any_head
from foretell.drafters.heads.networks.base import Texts
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig, BadModel
from foretell.models.decoder.decoder import Decoder
from tests.drafters.heads.networks.published import (
    Tensors,
    check_greedy,
    check_our_layout,
    said,
    states_of,
    target,
)
from tests.models.decoder.families import tiny

TARGET: Any = Decoder(tiny("llama"), "llama")
TARGET.tokenizer = None


def folder(path: Path, **changes: Any) -> tuple[Path, Tensors]:
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for i in range(3):
        tensors[f"{i}.0.linear.weight"] = torch.randn(32, 32, generator=draw) / 6
        tensors[f"{i}.0.linear.bias"] = torch.randn(32, generator=draw)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}
    for name, value in changes.items():
        (tensors if isinstance(value, torch.Tensor) else config)[name] = value
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "medusa_lm_head.safetensors")
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path, tensors


@torch.inference_mode()
def test_blocks_say_what_the_published_code_says(tmp_path: Path) -> None:
    path, tensors = folder(tmp_path)
    head, kept = load_any_head(path, TARGET, "medusa")
    assert kept is None
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    drafted = list(head.unroll_depths(Texts(torch.zeros(1, 5).long(), states, states, states), 3))
    said = [part.states @ TARGET.head.weight.T for part in drafted]
    wanted = []
    for i in range(3):
        inner = states @ tensors[f"{i}.0.linear.weight"].T + tensors[f"{i}.0.linear.bias"]
        wanted.append((states + inner * torch.sigmoid(inner)) @ TARGET.head.weight.T)
    for ours, theirs in zip(said, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (said[0] - wanted[1]).abs().max() > 0.01  # swapped heads are caught


@torch.inference_mode()
def test_vllms_names_have_no_bias_unless_they_say_so(tmp_path: Path) -> None:
    path, tensors = folder(tmp_path)
    own, _ = load_any_head(path, TARGET)
    (path / "medusa_lm_head.safetensors").unlink()
    theirs = {f"blocks.{i}.layers.0.weight": tensors[f"{i}.0.linear.weight"] for i in range(3)}
    save_file(theirs, path / "model.safetensors")
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    head, _ = load_any_head(path, TARGET, "medusa")
    for name, weight in head.state_dict().items():
        wanted = torch.zeros_like(weight) if name.endswith("bias") else own.state_dict()[name]
        torch.testing.assert_close(weight, wanted, rtol=0, atol=0)
    (path / "config.json").write_text(json.dumps(config | {"medusa_fc_bias": True}), "utf-8")
    with pytest.raises(BadModel, match=r"lacks blocks.0.layers.0.bias"):
        load_any_head(path, TARGET)


def own_matrices(path: Path, layers: int = 1) -> tuple[Path, Tensors]:
    """Version 1: blocks of so many layers, which are one in the published code, and matrices."""
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for i in range(3):
        weight, bias = torch.randn(32, 32, generator=draw) / 6, torch.randn(32, generator=draw)
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = weight.clone()
            tensors[f"{i}.{j}.linear.bias"] = bias.clone()
        tensors[f"{i}.{layers}.weight"] = torch.randn(97, 32, generator=draw) / 6
    told = {"medusa_num_heads": 2, "medusa_num_layers": layers}
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "medusa_lm_head.safetensors")
    (path / "config.json").write_text(json.dumps(told), "utf-8")
    return path, tensors


def published(tensors: Tensors, layers: int) -> list[torch.Tensor]:
    """What the blocks after the last state of the text say, head by head."""
    state = states_of(target(), (3,))[-2]
    norm: Any = target().loop.norm  # type: ignore[union-attr]
    found = []
    for i in range(3):
        z = norm(state)
        for j in range(layers):
            inner = tensors[f"{i}.{j}.linear.weight"] @ z + tensors[f"{i}.{j}.linear.bias"]
            z = z + inner * torch.sigmoid(inner)
        found.append(tensors[f"{i}.{layers}.weight"] @ z)
    return found


def close(folder: Path, wanted: list[torch.Tensor]) -> None:
    (row,) = said(target(), folder, "medusa", [])
    torch.testing.assert_close(row.unflatten(0, (3, -1)), torch.stack(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
@torch.inference_mode()
def test_each_depth_has_a_matrix_of_its_own(layers: int, tmp_path: Path) -> None:
    path, tensors = own_matrices(tmp_path / "theirs", layers)
    wanted = published(tensors, layers)
    assert (wanted[0] - wanted[1]).abs().max() > 0.1
    close(path, wanted)
    check_our_layout(target(), path, "medusa", tmp_path / "ours")
    check_greedy(target(), "medusa", path)


@torch.inference_mode()
def test_a_matrix_of_another_depth_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = own_matrices(tmp_path)
    first = Output.logits
    monkeypatch.setattr(Output, "logits", lambda self, states, depths: first(self, states))
    with pytest.raises(AssertionError):
        close(path, published(tensors, 1))


def vllm(path: Path, tensors: Tensors, **config: Any) -> Path:
    """The same in vLLM's names; tensors in `config` take the place of others."""
    made = {}
    for name, value in tensors.items():
        if "linear" in name:
            i, j, _, part = name.split(".")
            made[f"medusa_heads.blocks.{i}.layers.{j}.{part}"] = value
        else:
            made[f"medusa_heads.lm_heads.{name[0]}.weight"] = value
    told = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "vocab_size": 97}
    told |= {"truncated_vocab_size": 97, "medusa_fc_bias": True}
    for name, value in config.items():
        (made if isinstance(value, torch.Tensor) else told)[name] = value
    path.mkdir(exist_ok=True)
    save_file(made, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(told), "utf-8")
    return path


TOKENS = torch.tensor([50, 3, 90, 7])


@torch.inference_mode()
def test_vllms_matrices_may_be_of_some_tokens(tmp_path: Path) -> None:
    _, tensors = own_matrices(tmp_path / "theirs")
    wanted = published(tensors, 1)
    close(vllm(tmp_path / "whole", tensors), wanted)
    close(vllm(tmp_path / "scaled", tensors, logit_scale=0.5), [row * 0.5 for row in wanted])
    few = {"truncated_vocab_size": 4, "token_map": TOKENS}
    cut = {n: t[TOKENS] if t.shape[0] == 97 else t for n, t in tensors.items()}
    places = TOKENS.sort()[0]
    for name, given in (("cut", cut), ("to be cut", tensors)):
        folder = vllm(tmp_path / name, given, **few)
        assert load_any_head(folder, target())[1].tolist() == [3, 7, 50, 90]  # type: ignore[union-attr]
        close(folder, [row[places] for row in wanted])
    check_greedy(target(), "medusa", folder)


@torch.inference_mode()
def test_vllms_one_matrix_must_be_the_targets(tmp_path: Path) -> None:
    _, tensors = own_matrices(tmp_path / "theirs")
    blocks = {name: value for name, value in tensors.items() if "linear" in name}
    lm_head = target().head.weight.detach().clone()
    few = {"truncated_vocab_size": 4, "token_map": TOKENS, "original_lm_head": True}
    for name, matrix in (("lm_head.weight", lm_head[TOKENS]), ("lm_heads.0.weight", lm_head)):
        folder = vllm(tmp_path / name, blocks, **few, **{name: matrix.clone()})
        head, kept = load_any_head(folder, target())
        assert head.matrix is None and kept is not None and len(kept) == 4
    with pytest.raises(BadModel, match=r"lm_head.weight is not the output matrix"):
        load_any_head(
            vllm(tmp_path / "other", blocks, **few, **{"lm_head.weight": torch.randn(4, 32)}),
            target(),
        )


@pytest.mark.parametrize("layout", ["medusa", "medusa-vllm"])
@pytest.mark.parametrize("own", [True, False])
@torch.inference_mode()
def test_what_is_exported_says_the_same_when_it_is_loaded(
    layout: str, own: bool, tmp_path: Path
) -> None:
    path, tensors = own_matrices(tmp_path / "in") if own else folder(tmp_path / "in")
    head, kept = load_any_head(path, target())
    list_formats()[layout].write_head(head, kept, target(), tmp_path / "out")
    again, _ = load_any_head(tmp_path / "out", target(), "medusa")
    assert (again.matrix is None) != own
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16().float())
    names = set(load_file(next((tmp_path / "out").glob("*.safetensors"))))
    if layout == "medusa":
        assert names == {*tensors}
        return
    # vLLM's loader knows these, and with `original_lm_head` lm_head alone.
    wanted = {f"blocks.{i}.layers.0.{part}" for i in range(3) for part in ("weight", "bias")}
    wanted |= {f"lm_heads.{i}.weight" for i in range(3)} if own else {"lm_head.weight"}
    assert names == wanted
    told = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert told["num_heads"] == 3 and told["original_lm_head"] != own and told["medusa_fc_bias"]


@torch.inference_mode()
def test_a_head_of_some_tokens_is_exported_with_them(tmp_path: Path) -> None:
    head, _ = load_any_head(folder(tmp_path / "in")[0], target())
    kept = TOKENS.sort()[0]
    list_formats()["medusa-vllm"].write_head(head, kept, target(), tmp_path / "out")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(made["token_map"], kept)
    assert torch.equal(made["lm_head.weight"], target().head.weight[kept].bfloat16())
    assert torch.equal(load_any_head(tmp_path / "out", target())[1], kept)  # type: ignore[arg-type]
    of_four = build_head("medusa", target_shape(target()), {"own_matrix": 4})
    with pytest.raises(BadConfig, match="write --to medusa-vllm"):
        list_formats()["medusa"].write_head(of_four, kept, target(), tmp_path / "none")
    with pytest.raises(BadConfig, match="holds no hydra head"):
        list_formats()["medusa"].write_head(
            build_head("hydra", target_shape(target())), None, target(), tmp_path
        )


WRONG_VLLM: dict[str, tuple[dict[str, Any], str]] = {
    "map": ({"truncated_vocab_size": 4}, "lacks token_map"),
    "size": ({"truncated_vocab_size": 3, "token_map": TOKENS}, r"token_map is \(4,\)"),
    "token": (
        {"truncated_vocab_size": 2, "token_map": torch.tensor([5, 97])},
        "token_map: must name tokens below 97",
    ),
    "vocabulary": ({"vocab_size": 98}, "vocab_size=98"),
    "width": ({"hidden_size": 64}, "hidden_size=64"),
    "rows": (
        {"medusa_heads.lm_heads.1.weight": torch.zeros(98, 32)},
        "lm_heads.1.weight.* 98 rows",
    ),
    "columns": (
        {"medusa_heads.lm_heads.1.weight": torch.zeros(97, 31)},
        r"lm_heads.1.weight.* is \(97, 31\)",
    ),
    "many heads": ({"num_heads": 4}, "num_heads=4, and the file has 3"),
    "many layers": ({"num_hidden_layers": 2}, "num_hidden_layers=2, and the file has 1"),
    "scale": ({"original_lm_head": True, "logit_scale": 0.5}, "logit_scale=0.5"),
    "unknown": ({"lm_heads.3.weight": torch.zeros(97, 32)}, "has lm_heads.3.weight"),
    "twice": ({"lm_heads.0.weight": torch.zeros(97, 32)}, "has lm_heads.0.weight twice"),
}


@pytest.mark.parametrize("wrong", WRONG_VLLM)
def test_what_does_not_fit_vllms_names_is_refused(wrong: str, tmp_path: Path) -> None:
    changes, told = WRONG_VLLM[wrong]
    _, tensors = own_matrices(tmp_path / "theirs")
    with pytest.raises(BadModel, match=told):
        load_any_head(vllm(tmp_path / "vllm", tensors, **changes), target())


def test_there_are_no_layers_to_count(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="taps='output'"):
        load_any_head(folder(tmp_path)[0], TARGET, taps="output")
    shares = check_taps(tmp_path, TARGET, [1, 5, 3, 8, 2])
    assert list(shares) == ["medusa"] and 0 <= shares["medusa"] <= 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"medusa_num_layers": 2}, "medusa_num_layers=2"),
    "matrix": ({"0.1.weight": torch.zeros(97, 32)}, "lacks 1.1.weight"),
    "unknown": ({"lstm": torch.zeros(2)}, "has lstm"),
    "gap": ({"4.0.linear.weight": torch.zeros(32, 32)}, "lacks the block of head 3"),
    "cut off": ({"medusa_num_heads": 4}, "medusa_num_heads=4, and the file has 3"),
    "count": ({"medusa_num_heads": "all"}, "medusa_num_heads='all'"),
    "many": (
        {f"{i}.0.linear.{part}": torch.zeros(1) for i in range(17) for part in ("weight", "bias")},
        "has 17 of medusa_num_heads",
    ),
    "table": ({"embed_tokens.weight": torch.zeros(97, 32)}, "embed_tokens.weight is not the table"),
    "width": ({"0.0.linear.weight": torch.zeros(64, 64)}, r"0.0.linear.weight is \(64, 64\)"),
    "damaged": (
        {"0.0.linear.weight": torch.full((32, 32), torch.nan)}, "0.0.linear.weight is damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    changes, said = WRONG[wrong]
    with pytest.raises(BadModel, match=said):
        load_any_head(folder(tmp_path, **changes)[0], TARGET)
