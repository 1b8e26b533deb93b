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
from foretell.errors import BadConfig, BadModel, Unsupported
from foretell.families.decoder import Decoder
from foretell.families.toy import ToyRecurrent
from foretell.heads.folder import build, kinds, load, save, target_shape
from foretell.heads.model import head_model, shipped
from foretell.heads.output import Output
from foretell.ops.fingerprint import fingerprint
from tests.families.families import tiny


@cache
def target() -> Decoder:
    return Decoder(tiny("llama"), "tiny")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "it"
    torch.manual_seed(1)
    head = build("eagle3", target_shape(target()))
    save(head, torch.tensor([1, 5, 7, 30]), folder, target(), {"hits": [0.5]})
    return folder


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_every_kind_is_read_as_it_was_written(kind: str, tmp_path: Path) -> None:
    head = build(kind, target_shape(target()))
    save(head, None, tmp_path / kind, target(), {})
    again, kept = load(tmp_path / kind, target())
    assert kept is None and again.config == head.config
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16().float())


def test_the_tokens_are_kept(written: Path) -> None:
    _, kept = load(written, target(), "eagle3")
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
        load(folder, target())


def test_another_model_of_this_shape_is_warned_of(written: Path, tmp_path: Path) -> None:
    told = {**fingerprint(target()), "norm": "0" * 16}
    folder = changed(written, tmp_path / "it", fingerprint=told)
    with pytest.warns(UserWarning, match="weights other than those of tiny"):
        load(folder, target())


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
            load(folder, target())
    cut = changed(written, tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadModel, match="cannot be read"):
        load(cut, target())
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
            load(folder, target())
    (folder / "config.json").write_text("[1, 2]", "utf-8")
    with pytest.raises(BadModel, match="is no head's"):
        load(folder, target())
    with pytest.raises(BadModel, match="train head"):
        load(tmp_path / "nowhere", target())
    with pytest.raises(BadModel, match="is a head for eagle3, not for eagle"):
        load(written, target(), "eagle")


def test_unknown_kinds_and_options_are_told() -> None:
    with pytest.raises(BadConfig, match="kind='eagle9': must be one of"):
        build("eagle9", target_shape(target()))
    with pytest.raises(BadConfig, match="has no option 'tap'"):
        build("eagle3", target_shape(target()), {"tap": 3})


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
    assert build("eagle3", shape).taps == taps
    with pytest.raises(BadConfig, match="eagle3:taps"):
        build("eagle3", shape, {"taps": [0, 1, layers + 1]})


def test_where_none_ships_the_command_that_makes_one_is_named() -> None:
    assert shipped(target(), "eagle3") is None
    with pytest.raises(Unsupported, match="give eagle3:head=FOLDER; `foretell train head`"):
        head_model(target(), "eagle3", "eagle3", "", None)
    with pytest.raises(Unsupported, match="eagle3 cannot run on recurrent: it needs hidden states"):
        head_model(ToyRecurrent(), "eagle3", "eagle3", "", None)


@pytest.mark.parametrize("method", ["eagle", "eagle2", "eagle3"])
def test_texts_are_those_of_plain_decoding(method: str, tmp_path: Path) -> None:
    """In float32, with random weights."""
    lm = foretell.load("demo", dtype="float32", device="cpu", executor="torch")
    decoder = lm.models["target"]
    kind = "eagle" if method == "eagle2" else method
    head = build(kind, target_shape(decoder))
    head.begin(decoder)
    save(head, torch.arange(0, 8192, 2), tmp_path / "head", decoder, {})
    prompts = ["def add(a, b):", "import os\n"]
    want = lm.generate(prompts, "plain", max_new_tokens=12)
    got = lm.generate(prompts, f"{method}:head={tmp_path / 'head'},nodes=6", max_new_tokens=12)
    assert [out.tokens for out in got] == [out.tokens for out in want]
    assert all(out.stats.drafted for out in got)
