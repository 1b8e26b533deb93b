"""`foretell doctor`: says what computes a model here, and why other backends refused it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

import foretell
from foretell.cli._loading import load_model
from foretell.cli._options import (
    BackendOptions,
    Device,
    Draft,
    Dtype,
    Json,
    ModelOptions,
    Revision,
    TrustRemoteCode,
)
from foretell.cli._output import emit, emit_json

if TYPE_CHECKING:
    from foretell.api.diagnosis import ModelReport

FOR_DEVELOPMENT = ("dev", "docs")  # extras that make nothing quicker
WIDTH = 16  # columns of a label


@dataclass(frozen=True)
class Package:
    """An optional package. `version` is None where it is missing."""

    name: str
    wanted: str  # versions, as in >=1.31
    version: str | None
    install: str


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="`demo`, another name, a folder, a hub id or a .gguf. Without it, the machine.",
        ),
    ] = None,
    draft: Draft = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    *,
    backends: BackendOptions,
    as_json: Json = False,
) -> int:
    """Say what computes a model on this machine, and why other backends refused it."""
    machine = machine_facts()
    packages = optional_packages()
    reports: list[ModelReport] = []
    if model is not None:
        options = ModelOptions(model, draft, device, dtype, revision, trust_remote_code)
        lm = load_model(options, backends, profile=False)
        from foretell.api.diagnosis import diagnose

        reports = diagnose(lm)
    if as_json:
        models = _documents(reports) or []  # `executor`: as `backend` was called, for one release
        emit_json(
            {
                "schema": "foretell.doctor/1",
                "version": foretell.__version__,
                "machine": machine,
                "packages": _documents(packages),
                "models": [report | {"executor": report["backend"]} for report in models],
            }
        )
        return 0
    parts = [_section("machine", list(machine.items()))]
    parts.append(packages_text(packages))
    parts += [model_text(report) for report in reports]
    emit("\n\n".join(parts))
    return 0


def machine_facts() -> dict[str, Any]:
    """Facts that decide how fast a model runs here."""
    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "foretell": foretell.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "GPUs": ", ".join(gpus) or "none",
        "C library": c_library(),
    }


def c_library() -> str:
    """The kernels that the C library runs here, or why there is none."""
    from foretell.native import library

    try:
        library.load_kernels()
    except LookupError as error:
        return f"none: {error}"
    return f"{library.kernel_kind()} kernels"


def optional_packages() -> list[Package] | None:
    """The packages that foretell runs without, each once, as its own metadata lists them; None
    where there is no metadata, since it runs from a folder that is not installed.

    What several extras contain is installed with the first of them, which has the fewest others.
    """
    packages: dict[str, Package] = {}
    try:
        requirements = importlib.metadata.requires("foretell") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        extra_match = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", requirement)
        name_match = re.match(r"[\w.-]+", requirement)
        if (
            extra_match is None
            or name_match is None
            or extra_match[1] in FOR_DEVELOPMENT
            or name_match[0] in packages
        ):
            continue
        supported_versions = requirement.partition(";")[0][name_match.end() :].strip()
        try:
            version = importlib.metadata.version(name_match[0])
        except importlib.metadata.PackageNotFoundError:
            version = None
        install = f"pip install 'foretell[{extra_match[1]}]'"
        packages[name_match[0]] = Package(name_match[0], supported_versions, version, install)
    return list(packages.values())


def model_text(report: ModelReport) -> str:
    """Text that says what computes one model."""
    facts = {
        "computed by": report.backend,
        "number format": report.dtype,
        "family": report.family,
        "layers": f"{report.layers:,}",
        "vocabulary": f"{report.vocab:,} tokens",
        "context": f"{report.context:,} tokens",
        "layer loop": "foretell's" if report.loop else "the model's own forward",
        "fused blocks": "yes" if report.fused else "no",
    }
    if not report.refusals:
        facts["refused by"] = "nobody"
    description = report.description
    if description is not None:
        facts["described by"] = description.described_by
        facts["windows"] = description.windows or "not known"
        facts["matrices"] = "; ".join(
            f"{count:,} of {name}, {size / 1e6:,.1f} MB"
            for name, count, size in description.matrices
        )
    text = _section(f"{report.name}: {report.model}", list(facts.items()))
    if description is not None and description.differences:
        differences = description.differences
        text += "\n" + _section("  differs from a llama layer in", differences, indent=4)
    if description is not None and description.experts:
        text += "\n" + _section("  experts", description.experts, indent=4)
    if report.refusals:
        text += "\n" + _section("  refused by", report.refusals, indent=4)
    return text


def packages_text(packages: list[Package] | None) -> str:
    """Which optional packages are here, as text."""
    title = "optional packages"
    if packages is None:
        return (
            f"{title}\n  not known: foretell is not installed; run pip install -e . in its folder"
        )
    facts = []
    for package in packages:
        state = f"missing: {package.install}"
        if package.version is not None:
            state = f"{package.version} (supported: {package.wanted})"
        facts.append((package.name, state))
    return _section(title, facts)


def _documents(items: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    return None if items is None else [dataclasses.asdict(item) for item in items]


def _section(title: str, facts: Sequence[tuple[str, Any]], indent: int = 2) -> str:
    width = max([WIDTH, *(len(name) for name, _ in facts)])
    lines = [f"{' ' * indent}{name:<{width}}  {fact}" for name, fact in facts]
    return "\n".join([title, *lines])
