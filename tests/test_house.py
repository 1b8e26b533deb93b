"""The rules of scripts/house.py hold, and each notices a planted breach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).resolve().parent.parent
CARD = '"""A method.\n\nGuarantee: exact\n"""\n'


def package(root: Path, files: dict[str, str]) -> Path:
    """A package with these files, path below it -> text."""
    for place, text in files.items():
        path = root / "foretell" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root / "foretell"


def test_the_package_keeps_the_rules() -> None:
    assert house.broken() == []


def test_every_layer_exists() -> None:
    missing = [name for name, _ in house.LAYERS if not (ROOT / "foretell" / name).exists()]
    assert missing == []


def test_annotations_that_name_what_stands_above_are_still_there() -> None:
    found = {(one.file, one.imported) for one in house.imports(ROOT / "foretell") if one.for_types}
    assert found >= house.ANNOTATIONS


BREACHES: dict[str, tuple[Callable[[Path], list[str]], dict[str, str], str]] = {
    "an import upwards": (
        house.upward,
        {"core/tree.py": "from foretell.engine.engine import Engine", "engine/engine.py": ""},
        "core/tree.py imports engine/engine.py, which stands above it",
    ),
    "an import upwards within a function": (
        house.upward,
        {
            "core/tree.py": "def f():\n    from foretell.engine import engine",
            "engine/engine.py": "",
        },
        "core/tree.py imports engine/engine.py, which stands above it",
    ),
    "an import upwards for an annotation": (
        house.upward,
        {
            "core/tree.py": "if TYPE_CHECKING:\n    from foretell.engine.engine import Engine",
            "engine/engine.py": "",
        },
        "core/tree.py imports engine/engine.py, which stands above it",
    ),
    "an annotation that is allowed, as an import that runs": (
        house.upward,
        {"cache/cache.py": "from foretell.core.types import Ask", "core/types.py": ""},
        "cache/cache.py imports core/types.py, which stands above it",
    ),
    "a file in no layer": (
        house.upward,
        {"helpers.py": "", "engine/engine.py": ""},
        "helpers.py is in no layer of scripts/house.py",
    ),
    "ops that know more than tensors": (
        house.low_imports,
        {"ops/files.py": "import json\nimport transformers\n"},
        "ops/files.py imports transformers",
    ),
    "ops that know the heart": (
        house.low_imports,
        {"ops/files.py": "from foretell.core.tree import TokenTree"},
        "ops/files.py imports foretell.core.tree",
    ),
    "a module of ops with users in one folder": (
        house.lonely,
        {
            "ops/one.py": "",
            "kv/a.py": "from foretell.ops import one",
            "kv/b.py": "from foretell.ops import one",
        },
        "ops/one.py is imported by kv alone",
    ),
    "a method that imports another": (
        house.siblings,
        {
            "drafters/lookup/a.py": CARD + "from foretell.drafters.model.b import B",
            "drafters/model/b.py": CARD,
        },
        "drafters/lookup/a.py imports the method drafters/model/b.py",
    ),
    "a crowded folder": (
        house.crowded,
        {f"core/f{i}.py": "" for i in range(house.FILES_IN_A_FOLDER + 1)},
        f"core has {house.FILES_IN_A_FOLDER + 1} files; {house.FILES_IN_A_FOLDER} are enough",
    ),
    "a crowded top": (
        house.crowded,
        {f"f{i}.py": "" for i in range(house.FILES_ON_TOP + 1)},
        f". has {house.FILES_ON_TOP + 1} files; {house.FILES_ON_TOP} are enough",
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_noticed(breach: str, tmp_path: Path) -> None:
    rule, files, sentence = BREACHES[breach]
    assert rule(package(tmp_path, files)) == [sentence]


def test_what_is_allowed_is_no_breach(tmp_path: Path) -> None:
    files = {
        "core/tree.py": "from foretell.ops import one",
        "core/types.py": "",
        "cache/cache.py": "if TYPE_CHECKING:\n    from foretell.core.types import Ask",
        "ops/one.py": "import numpy as np\nfrom foretell.native import rows",
        "native/rows.py": "",
        "drafters/lookup/a.py": CARD + "from foretell.drafters.lookup import shared",
        "drafters/lookup/shared.py": "from foretell.ops import one",
    }
    assert house.broken(package(tmp_path, files)) == []


def test_a_circle_of_folders_is_noticed(tmp_path: Path) -> None:
    files = {
        "core/a.py": "from foretell.cache import b",
        "cache/b.py": "",
        "cache/c.py": "from foretell.core import d",
        "core/d.py": "",
    }
    assert house.folder_circles(package(tmp_path, files)) == [["cache", "core"]]
