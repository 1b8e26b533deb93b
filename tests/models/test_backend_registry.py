"""Backends are found by their files' names, and their order is what the files declare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.errors import BadConfig
from foretell.models import backend_registry as registry
from foretell.models.backend import Backend


def test_the_backends_of_a_device_in_the_order_they_are_tried() -> None:
    assert registry.backend_names() == ["openvino", "onnxruntime", "native", "graphs"]
    assert registry.backend_names("cpu") == ["openvino", "onnxruntime", "native"]
    assert registry.backend_names("cuda") == ["graphs"]
    assert registry.backend_names("mps") == []
    assert registry.device_of("graphs") == "cuda"


@pytest.mark.parametrize("name", registry.backend_names())
def test_a_file_holds_what_it_declares_and_what_is_asked_of_it(name: str) -> None:
    module = registry.load_backend(name)
    assert registry.declared_backends()[name] == (module.DEVICE, module.PRIORITY)
    assert module.DTYPE is None or isinstance(module.DTYPE, torch.dtype)
    assert callable(module.make_backend) and callable(module.suits_model)
    assert isinstance(module.WHOLE, bool)
    assert not module.WHOLE or callable(module.prepare_model)


def test_a_name_that_is_no_backend_s() -> None:
    for find in (registry.load_backend, registry.device_of):
        with pytest.raises(BadConfig, match="'pool': must be one of openvino, onnxruntime, native"):
            find("pool")


def test_listing_imports_no_runtime() -> None:
    code = (
        "import sys; from foretell.models.backend_registry import backend_names; backend_names(); "
        "print(sorted({'openvino', 'onnxruntime', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_new_file_is_found_and_edits_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = tmp_path / "backends"
    backends.mkdir()
    (backends / "fast.py").write_text('"""Fast."""\n\nDEVICE = "cpu"\nPRIORITY = 3\nDTYPE = None\n')
    (backends / "helper.py").write_text('"""No backend."""\nDEVICES = "cpu"\n')
    (backends / "_private.py").write_text('DEVICE = "cpu"\nPRIORITY = 1\n')
    monkeypatch.setattr(registry, "PACKAGE", tmp_path)
    registry.declared_backends.cache_clear()
    try:
        assert registry.backend_names() == ["fast"] and registry.device_of("fast") == "cpu"
    finally:
        monkeypatch.undo()
        registry.declared_backends.cache_clear()


class Suits:
    """In place of a backend's module."""

    def __init__(self, suits: bool, whole: bool = False):
        self.answer = suits
        self.WHOLE = whole

    def suits_model(self, hf_model: Any, by_name: bool = False) -> bool:
        return self.answer


def test_which_backends_are_tried_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "openvino": Suits(True),
        "onnxruntime": Suits(False),
        "native": Suits(True, whole=True),
        "graphs": Suits(True),
    }
    monkeypatch.setattr(registry, "load_backend", modules.__getitem__)

    def tried(device: str, wanted: str = "auto") -> list[str]:
        return [name for name, _ in registry.candidate_backends(None, device, wanted)]

    assert tried("cpu") == ["openvino"]
    assert tried("cpu", "openvino") == ["openvino"]
    assert tried("cpu", "onnxruntime") == ["openvino", "onnxruntime"], "by name, it is tried"
    assert tried("cuda") == tried("cuda", "graphs") == ["graphs"]
    assert tried("mps") == []
    modules["onnxruntime"].answer = True
    assert tried("cpu") == ["openvino", "onnxruntime"]


class Fake(Backend):
    def __init__(self, name: str, fallback: Backend | None = None):
        self.name = name
        self.fallback = fallback
        self.size = 0
        self.sizes = ()

    def cache(self) -> Any:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def __call__(self, *args: Any) -> None:
        return None


def test_the_order_to_make_backends_in() -> None:
    assert registry.fallback_order(None) == []
    assert registry.fallback_order(Fake("b", Fake("a"))) == ["a", "b"]
    Fake("a").warm(None)  # type: ignore[arg-type]  # nothing to do, by default


def test_those_that_compute_everything_are_tried_before(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: Suits(True, whole=name == "native") for name in registry.backend_names()}
    monkeypatch.setattr(registry, "load_backend", modules.__getitem__)

    def tried(wanted: str = "auto", device: str = "cpu") -> list[str]:
        return [name for name, _ in registry.whole_backends(None, device, wanted)]

    assert tried() == ["native"] and tried("native") == ["native"]
    assert tried("openvino") == [] and tried(device="cuda") == []
    modules["native"].answer = False
    assert tried() == [] and tried("native") == ["native"]
