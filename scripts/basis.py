"""What figures rest on: what `auto` stands for, the heads that ship, the backends, the server.

A figure was true of these when it was taken. `scripts/figures.py` writes them down beside each in
dev/measured/taken.toml, and `scripts/docs.py --check` fails where one has changed since. Nothing
here imports torch.
"""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from foretell import spec

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "foretell"
MODELS = ROOT / "models" / "foretell_models"
TAKEN = ROOT / "dev" / "measured" / "taken.toml"
AUTO = ("AUTO", "STATIC", "QUICK", "STEP", "DRAFT", "CHEAP", "HEAD", "HEAD_STEP")
POLICY = {  # what decides how much a step drafts
    "compose": "speculation/composition.py",
    "costs": "speculation/costs.py",
    "schedule": "engine/scheduler.py",
    "sizes": "speculation/draft_size.py",
}
KINDS = ("auto", "policy", "heads", "executors")
RESTS = {  # what the figures rest on
    "batch": (*KINDS, "server"),
    "draft": KINDS,
    "engines": KINDS,
    "kv": ("executors",),
    "never-slower": KINDS,
    "never-slower-16": KINDS,
    "never-slower-4": KINDS,
    "serving": (*KINDS, "server"),
}
RUNTIME = re.compile(r'^DEVICE = "cpu"\n(?:.*\n)*?^PRIORITY = (\d+)$', re.MULTILINE)


@cache
def basis() -> dict[str, str]:
    """Of each thing that figures rest on how it is now, in words or as a digest."""
    return {
        "auto": auto(),
        "policy": policy(),
        "heads": heads(),
        "executors": backends(),
        "server": server(),
    }


def auto() -> str:
    """What `auto` stands for, and from when on."""
    return "; ".join(f"{name.lower()} {getattr(spec, name)}" for name in AUTO)


def policy() -> str:
    """By what numbers it is decided how much a step drafts, and whom it asks."""
    numbers = [
        f"{name}.{ast.unparse(node)}"
        for name, file in POLICY.items()
        for node in ast.parse((PACKAGE / file).read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).isupper()
    ]
    return hashlib.sha256("\n".join(numbers).encode()).hexdigest()[:12]


def heads() -> str:
    """The heads and draft models that ship, by digests of their weights."""
    folders = sorted({path.parent for path in MODELS.glob("smollm2-*/config.json")})
    return ", ".join(f"{folder.name} {digest(folder / 'model.safetensors')}" for folder in folders)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def backends() -> str:
    """Those that may compute a model on a CPU, the one that is asked first first."""
    found = []
    for path in (PACKAGE / "backends").glob("*.py"):
        if declared := RUNTIME.search(path.read_text("utf-8")):
            found.append((-int(declared[1]), path.stem))
    return ", ".join(name for _, name in sorted(found))


def server() -> str:
    """What the server does unless it is told otherwise."""
    module = ast.parse((PACKAGE / "serve" / "settings.py").read_text("utf-8"))
    fields = [
        ast.unparse(node)
        for part in module.body
        if isinstance(part, ast.ClassDef)
        for node in part.body
        if isinstance(node, ast.AnnAssign) and node.value is not None
    ]
    return hashlib.sha256("\n".join(fields).encode()).hexdigest()[:12]


def default() -> str:
    """What `auto` stands for on `smollm2`, the model of the figures."""
    return f"{spec.QUICK}+{spec.HEAD}"


def taken(path: Path = TAKEN) -> dict[str, dict[str, Any]]:
    """The record of every figure: command, commit, date, and what it rests on."""
    return tomllib.loads(path.read_text("utf-8"))


def expired(records: dict[str, dict[str, Any]], now: dict[str, str]) -> list[str]:
    """One sentence for every figure that rests on what is no longer so."""
    found = []
    for name, record in records.items():
        for what in RESTS[name]:
            then = record["rests"].get(what, "not looked at")
            if then != now[what]:
                found.append(
                    f"the figures {name!r} of {record['date']} rest on {what} as it was ({then}), "
                    f"and now it is {now.get(what)}; run `python scripts/figures.py {name}`"
                )
    return found


def stated(record: dict[str, Any]) -> str:
    """What stands below the tables of a figure."""
    return (
        f"Taken by `{record['command']}` at commit {record['commit']}, {record['date']}; `auto` is "
        f"`{record['default']}`."
    )
