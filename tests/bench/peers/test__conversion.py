"""A peer's models in its own format."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.peers._conversion import convert_model, model_folder
from foretell.bench.peers._environment import Environment, peer_folder
from foretell.errors import Unsupported


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    return folder


class Converter:
    """Stands for the process that converts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, code: int = 0, said: str = "", write: bool = True
    ):
        self.calls: list[dict[str, Any]] = []
        self.code = code
        self.said = said
        self.write = write
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        options = json.loads(command[-1])
        self.calls.append(options)
        if self.write:
            Path(options["out"]).write_text("converted")
        return subprocess.CompletedProcess(command, self.code, "", self.said)


def test_a_model_is_converted_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Environment("llama.cpp", "python", False)
    converter = Converter(monkeypatch)
    out = convert_model(where, str(model), "BF16", {"type": "bf16"})
    assert out.read_text() == "converted"
    assert out.parent == peer_folder("llama.cpp") / "models"
    assert out.name.startswith("model-BF16-")
    assert list(out.parent.iterdir()) == [out]
    assert converter.calls[0]["source"] == str(model)
    assert converter.calls[0]["type"] == "bf16"
    assert convert_model(where, str(model), "BF16", {"type": "bf16"}) == out
    assert len(converter.calls) == 1
    assert convert_model(where, str(model), "Q8_0", {}) != out
    assert len(converter.calls) == 2
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert convert_model(where, str(model), "BF16", {}) != out, "the weights are others"
    assert len(converter.calls) == 3


@pytest.mark.parametrize(
    ("code", "said", "write", "why"),
    [
        (
            1,
            "a traceback\n  ValueError: no such architecture\n\n",
            True,
            "ValueError: no such architecture",
        ),
        (2, "", True, "exit 2"),
        (0, "warning", False, "warning"),
    ],
)
def test_a_failed_conversion_leaves_nothing(
    code: int, said: str, write: bool, why: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Converter(monkeypatch, code, said, write)
    with pytest.raises(Unsupported, match=f"^llama.cpp cannot convert model to BF16: {why}$"):
        convert_model(Environment("llama.cpp", "python", False), str(model), "BF16", {})
    assert list((peer_folder("llama.cpp") / "models").iterdir()) == []


def test_a_hub_id_is_looked_up_among_what_was_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def download(name: str, local_files_only: bool) -> str:
        assert name == "owner/name"
        assert local_files_only
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_folder("owner/name") == model == model_folder(str(model))


def test_a_gguf_file_is_no_folder_to_convert() -> None:
    with pytest.raises(Unsupported, match=r"model\.gguf: is no folder .* compare llama\.cpp"):
        model_folder("/models/model.gguf")
