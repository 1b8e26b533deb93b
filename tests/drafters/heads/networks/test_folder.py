"""Heads on disk: what is written is read again, and everything else is refused in words."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretell
from foretell.drafters.heads.attach import head_model, shipped_head
from foretell.drafters.heads.networks.folder import (
    build_head,
    head_kinds,
    load_head,
    save_head,
    target_shape,
)
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig, BadModel, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.ops.fingerprint import fingerprint
from foretell.testing.toy import ToyRecurrent
from tests.models.decoder.families import tiny


@cache
def target() -> Decoder:
    return Decoder(tiny("llama"), "tiny")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "it"
    torch.manual_seed(1)
    head = build_head("eagle3", target_shape(target()))
    save_head(head, torch.tensor([1, 5, 7, 30]), folder, target(), {"hits": [0.5]})
    return folder


@pytest.mark.parametrize("kind", sorted(head_kinds()))
def test_every_kind_is_read_as_it_was_written(kind: str, tmp_path: Path) -> None:
    head = build_head(kind, target_shape(target()))
    save_head(head, None, tmp_path / kind, target(), {})
    again, kept = load_head(tmp_path / kind, target())
    assert kept is None and again.config == head.config
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16().float())


def test_the_tokens_are_kept(written: Path) -> None:
    _, kept = load_head(written, target(), "eagle3")
    assert kept is not None and kept.tolist() == [1, 5, 7, 30]
    model = head_model(target(), "eagle3", "eagle3", str(written), None)
    assert model.tokens == [1, 5, 7, 30] and model.output.size == 4


def changed(written: Path, folder: Path, **fields: Any) -> Path:
    shutil.copytree(written, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize("field", ["hidden", "layers", "vocab", "heads", "width"])
def test_another_shape_of_target_is_refused_by_the_field(
    field: str, written: Path, tmp_path: Path
) -> None:
    shape = dataclasses.asdict(target_shape(target()))
    folder = changed(written, tmp_path / "it", target={**shape, field: shape[field] * 2})
    with pytest.raises(BadModel, match=f"{field}={shape[field] * 2}, and tiny has {shape[field]}"):
        load_head(folder, target())


def test_another_model_of_this_shape_is_warned_of(written: Path, tmp_path: Path) -> None:
    told = {**fingerprint(target()), "norm": "0" * 16}
    folder = changed(written, tmp_path / "it", fingerprint=told)
    with pytest.warns(UserWarning, match="weights other than those of tiny"):
        load_head(folder, target())


def test_what_is_damaged_is_told(written: Path, tmp_path: Path) -> None:
    tensors = load_file(written / "model.safetensors")
    for number, (change, words) in enumerate(
        (
            ({"norm.weight": None}, "lacks norm.weight"),
            ({"more": torch.zeros(1)}, "has more, which eagle3 has not"),
            ({"norm.weight": torch.zeros(3)}, r"norm.weight is \(3,\)"),
            ({"norm.weight": tensors["norm.weight"] / 0}, r"norm.weight is damaged \(a weight is"),
        )
    ):
        folder = changed(written, tmp_path / str(number))
        found = {name: value for name, value in {**tensors, **change}.items() if value is not None}
        save_file(found, folder / "model.safetensors")
        with pytest.raises(BadModel, match=words):
            load_head(folder, target())
    cut = changed(written, tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadModel, match="cannot be read"):
        load_head(cut, target())
    for fields, words in (
        ({"schema": "else"}, "is of schema 'else'"),
        ({"kind": "eagle9"}, "config.json: kind='eagle9' is none of"),
        ({"kind": None}, "config.json: kind=None must name a kind"),
        ({"kind": ["eagle3"]}, r"config.json: kind=\['eagle3'\] must name a kind"),
        ({"target": {"hidden": 1}}, "config.json: target or options are damaged"),
        ({"options": "many"}, "config.json: target or options are damaged"),
        ({"options": {"tap": 3}}, "config.json: eagle3: has no option 'tap'"),
        ({"options": {"taps": [0, 1, 9]}}, r"config.json: eagle3:taps=\[0, 1, 9\]"),
        ({"fingerprint": [1]}, r"config.json: fingerprint=\[1\] must be a table"),
    ):
        folder = changed(written, tmp_path / f"field{len(list(tmp_path.iterdir()))}", **fields)
        with pytest.raises(BadModel, match=words):
            load_head(folder, target())
    (folder / "config.json").write_text("[1, 2]", "utf-8")
    with pytest.raises(BadModel, match="is no head's"):
        load_head(folder, target())
    with pytest.raises(BadModel, match="train head"):
        load_head(tmp_path / "nowhere", target())
    with pytest.raises(BadModel, match="is a head for eagle3, not for eagle"):
        load_head(written, target(), "eagle")


def test_unknown_kinds_and_options_are_told() -> None:
    with pytest.raises(BadConfig, match="kind='eagle9': must be one of"):
        build_head("eagle9", target_shape(target()))
    with pytest.raises(BadConfig, match="has no option 'tap'"):
        build_head("eagle3", target_shape(target()), {"tap": 3})


@pytest.mark.parametrize("kept", [[], [-1, 3], [3, 3], [5, 2], [0, 10_000]])
def test_kept_tokens_are_ids_in_order(kept: list[int]) -> None:
    assert Output(target(), torch.tensor([0, 3])).size == 2
    with pytest.raises(BadConfig, match="kept tokens: must be ids from 0 to 96"):
        Output(target(), torch.tensor(kept, dtype=torch.long))


@pytest.mark.parametrize(
    ("layers", "taps"), [(1, (1, 0, 0)), (2, (2, 1, 0)), (3, (2, 1, 0)), (8, (2, 4, 5))]
)
def test_eagle3_reads_layers_that_a_target_has(layers: int, taps: tuple[int, ...]) -> None:
    shape = dataclasses.replace(target_shape(target()), layers=layers)
    assert build_head("eagle3", shape).taps == taps
    with pytest.raises(BadConfig, match="eagle3:taps"):
        build_head("eagle3", shape, {"taps": [0, 1, layers + 1]})


def test_where_none_ships_the_command_that_makes_one_is_named() -> None:
    assert shipped_head(target(), "eagle3") is None
    with pytest.raises(Unsupported, match="give eagle3:head=FOLDER; `foretell train head`"):
        head_model(target(), "eagle3", "eagle3", "", None)
    with pytest.raises(Unsupported, match="eagle3 cannot run on recurrent: it needs hidden states"):
        head_model(ToyRecurrent(), "eagle3", "eagle3", "", None)


@pytest.mark.parametrize("method", ["eagle", "eagle2", "eagle3"])
def test_texts_are_those_of_plain_decoding(method: str, tmp_path: Path) -> None:
    """In float32, with random weights."""
    lm = foretell.load("demo", dtype="float32", device="cpu", backend="torch")
    decoder = lm.models["target"]
    kind = "eagle" if method == "eagle2" else method
    head = build_head(kind, target_shape(decoder))
    head.take_weights(decoder)
    save_head(head, torch.arange(0, 8192, 2), tmp_path / "head", decoder, {})
    prompts = ["def add(a, b):", "import os\n"]
    want = lm.generate(prompts, "plain", max_new_tokens=12)
    got = lm.generate(prompts, f"{method}:head={tmp_path / 'head'},nodes=6", max_new_tokens=12)
    assert [out.tokens for out in got] == [out.tokens for out in want]
    assert all(out.stats.drafted for out in got)


# --- configurations that say more than the files hold


def spoilt(folder: Path, kind: str, options: dict[str, Any], tensors: Any = None) -> Path:
    """A head whose configuration, and tensors where any are given, are not what it was made of."""
    head = build_head(kind, target_shape(target()))
    save_head(head, None, folder, target(), {})
    config = json.loads((folder / "config.json").read_text())
    config["options"] |= options
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    return folder


VOCAB = 97
OWN = ("eagle3", "mtp", "medusa", "hydra", "mlp-speculator")


@pytest.mark.parametrize("rows", [VOCAB + 6, VOCAB - 2, 1 << 40, -1, "90", True, 3.5])
@pytest.mark.parametrize("kind", OWN)
def test_an_output_matrix_of_other_rows_than_tokens_is_refused(
    kind: str, rows: Any, tmp_path: Path
) -> None:
    hidden = target_shape(target()).hidden
    given = rows if type(rows) is int and 0 < rows < 1000 else 4
    several = {"medusa": 4, "hydra": 4}.get(kind, 0)
    names = [f"matrix.{i}" for i in range(several)] or ["matrix"]
    tensors = {f"{name}.weight": torch.zeros(given, hidden) for name in names}
    if kind == "hydra":
        tensors |= {f"{name}.bias": torch.zeros(given) for name in names}
    folder = spoilt(tmp_path / "it", kind, {"own_matrix": rows}, tensors)
    with pytest.raises(BadModel, match="own_matrix=") as refused:
        load_head(folder, target())
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.parametrize("kept", [[0, VOCAB], [-1, 3], [5, 5], [7, 3], [], [[1, 2]], [0.0, 1.0]])
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "clover"])
def test_so_are_kept_tokens_that_the_target_has_not(
    kind: str, kept: list[Any], tmp_path: Path
) -> None:
    folder = spoilt(tmp_path / "it", kind, {}, {"kept": torch.tensor(kept)})
    with pytest.raises(BadModel, match=f"kept tokens: must be ids from 0 to {VOCAB - 1}"):
        load_head(folder, target())


def test_so_are_fewer_rows_than_kept_tokens(tmp_path: Path) -> None:
    matrix = {"matrix.weight": torch.zeros(3, target_shape(target()).hidden)}
    kept = {"kept": torch.tensor([1, 2, 3, 4])}
    folder = spoilt(tmp_path / "it", "eagle3", {"own_matrix": 3}, matrix | kept)
    with pytest.raises(BadModel, match="own_matrix=3: must have a row for each of 4 tokens"):
        load_head(folder, target())


DAMAGED: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {"taps": 3}),
    ("eagle3", {"taps": ["a"]}),
    ("eagle3", {"taps": [0] * 100}),
    ("eagle3", {"tap_norms": ["each"]}),
    ("eagle3", {"layer": {"heads": 1 << 40}}),
    ("eagle3", {"layer": {"width": 33}}),
    ("eagle3", {"layer": {"intermediate": 1 << 30}}),
    ("eagle3", {"layer": {"intermediate": -1}}),
    ("eagle3", {"layer": {"kv_heads": 3}}),
    ("eagle3", {"layer": {"theta": "high"}}),
    ("eagle3", {"layer": {"eps": float("nan")}}),
    ("eagle", {"layer": {"hidden": 48}}),
    ("eagle", {"layer": {"colour": 1}}),
    ("eagle", {"layer": []}),
    ("eagle", {"bias": 1}),
    ("dflash", {"block": 1}),
    ("dflash", {"block": "8"}),
    ("dflash", {"layers": 1 << 30}),
    ("dflash", {"taps": [99]}),
    ("mtp", {"family": {"model_type": "nobody"}}),
    ("mtp", {"family": 3}),
    ("mlp-speculator", {"own_matrix": VOCAB, "inner": 1 << 40}),
    ("mlp-speculator", {"own_matrix": VOCAB, "steps": 0}),
    ("kangaroo", {"layers": 1.5}),
    ("kangaroo", {"layers": 0}),
]


@pytest.mark.parametrize("kind, options", DAMAGED, ids=str)
def test_options_of_another_type_or_size_are_one_line(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = spoilt(tmp_path / "it", kind, options)
    with pytest.raises(BadModel, match=r"config.json|model.safetensors") as refused:
        load_head(folder, target())
    assert "\n" not in str(refused.value)


def test_a_configuration_takes_no_memory_that_its_file_does_not_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is built first has no memory at all."""
    from foretell.drafters.heads.networks import folder as module

    made = []

    def noted(*args: Any) -> Any:
        head = build_head(*args)
        made.append(next(head.parameters()).device.type)
        return head

    monkeypatch.setattr(module, "build_head", noted)
    folder = spoilt(tmp_path / "it", "eagle3", {"own_matrix": VOCAB})
    with pytest.raises(BadModel, match=r"lacks matrix.weight"):
        load_head(folder, target())
    assert made == ["meta"]


def test_deeply_nested_json_is_one_line(tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "it", "eagle3", {})
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(BadModel, match="nested too deeply"):
        load_head(folder, target())


def test_a_target_whose_mlps_have_no_known_width_is_refused() -> None:
    model = Decoder(tiny("gpt2"), "gpt2", fused_blocks)
    with pytest.raises(Unsupported, match="intermediate_size"):
        target_shape(model)
