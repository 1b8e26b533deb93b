"""`foretell doctor`: the machine, the optional packages, and what computes a model."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.api import diagnosis
from foretell.api.layer_report import LayerReport
from foretell.cli import doctor
from foretell.cli.doctor import c_library
from foretell.loading import load as loading
from foretell.native.library import is_available, kernel_kind
from tests.native.machines import no_library


@dataclass(frozen=True)
class Report:
    """The fields of foretell.api.diagnosis.ModelReport."""

    name: str = "target"
    model: str = "tiny"
    family: str = "llama"
    dtype: str = "float32"
    backend: str = "torch"
    refusals: tuple[tuple[str, str], ...] = ()
    loop: bool = True
    fused: bool = False
    layers: int = 2
    vocab: int = 32_000
    context: int = 2048
    description: LayerReport | None = None


LAYERS = LayerReport(
    "foretell/models/families/mixtures.py",
    (("residual", "0.4"),),
    (("chosen", "2 of 8 a token"),),
    "512 tokens in layer 0; none in layer 1",
    (("int8", 12, 1_500_000), ("bfloat16", 1, 200_000)),
)
REFUSED = Report(refusals=(("openvino", "no AVX2"), ("onnxruntime", "the package is missing")))


@pytest.fixture
def diagnosed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were diagnosed; the diagnosis itself is made up."""
    asked: list[Any] = []

    def diagnose(lm: Any) -> list[Report]:
        asked.append(lm)
        return [REFUSED, Report(name="draft", backend="openvino", fused=True, description=LAYERS)]

    monkeypatch.setattr(diagnosis, "diagnose", diagnose)
    monkeypatch.setattr(loading, "notice_refusals", lambda *_: None)  # which diagnoses too
    return asked


def test_who_computes_a_model_is_said_in_full(run: Any, folder: str, diagnosed: list[Any]) -> None:
    code, out, err = run("doctor", folder, "--backend", "torch")
    assert (code, err) == (0, "") and len(diagnosed) == 1
    target, draft = out.split("\n\n")[2:]
    lines = [line.split(maxsplit=2) for line in target.splitlines()]
    assert lines[0] == ["target:", "tiny"] and lines[1] == ["computed", "by", "torch"]
    assert "  refused by\n" in target
    assert "    openvino          no AVX2\n" in target
    assert "    onnxruntime       the package is missing" in target
    assert "32,000 tokens" in target and "foretell's" in target
    assert draft.startswith("draft: tiny\n  computed by       openvino\n")
    assert "refused by        nobody" in draft
    assert "described by      foretell/models/families/mixtures.py" in draft
    assert "windows           512 tokens in layer 0; none in layer 1" in draft
    assert "matrices          12 of int8, 1.5 MB; 1 of bfloat16, 0.2 MB" in draft
    assert "  differs from a llama layer in\n    residual          0.4\n" in draft
    assert "  experts\n    chosen            2 of 8 a token" in draft
    assert "differs from" not in target


def test_doctor_without_a_model_describes_the_machine(run: Any, diagnosed: list[Any]) -> None:
    code, out, err = run("doctor")
    assert (code, err, diagnosed) == (0, "", [])
    assert out.startswith("machine\n  foretell ") and "optional packages\n  openvino" in out
    assert f"torch             {torch.__version__}" in out


def test_doctor_as_json(run: Any, folder: str, diagnosed: list[Any]) -> None:
    code, out, _ = run("doctor", folder, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "foretell.doctor/1"
    assert document["machine"]["threads"] == torch.get_num_threads()
    target, draft = document["models"]
    assert target["refusals"] == [list(pair) for pair in REFUSED.refusals]
    assert (draft["name"], draft["backend"], draft["fused"]) == ("draft", "openvino", True)
    assert draft["description"]["differences"] == [["residual", "0.4"]]
    names = [package["name"] for package in document["packages"]]
    assert {"openvino", "onnxruntime", "llama-cpp-python", "fastapi", "ray"} <= {*names}
    assert len(names) == len({*names})
    assert json.loads(run("doctor", "--json")[1])["models"] == []


def test_a_missing_package_comes_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [
        "torch>=2.9",
        'fast<3,>=2; extra == "cpu"',
        'absent>=1; extra == "gguf"',
        'pytest>=8; extra == "dev"',
    ]

    def version(name: str) -> str:
        if name == "absent":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.5"

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(importlib.metadata, "version", version)
    text = doctor.packages_text(doctor.optional_packages())
    assert text.splitlines()[1:] == [
        "  fast              2.5 (supported: <3,>=2)",
        "  absent            missing: pip install 'foretell[gguf]'",
    ]


def test_a_package_of_several_extras_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [f'absent>=1; extra == "{extra}"' for extra in ("dev", "serve", "ray")]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    packages = doctor.optional_packages()
    assert packages is not None
    assert [package.install for package in packages] == ["pip install 'foretell[serve]'"]


def test_without_metadata_the_packages_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert doctor.optional_packages() is None
    assert "pip install -e ." in doctor.packages_text(None)


def test_the_c_library_is_named_or_why_there_is_none() -> None:
    with no_library():
        assert c_library() == "none: FORETELL_NATIVE=off"
    if is_available():
        assert c_library() == f"{kernel_kind()} kernels"
