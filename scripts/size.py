"""Prints the size of every file of the package and fails where a budget is broken.

The heart, `core/`, is what a reader must hold in mind, so it has a budget as a whole and one a
file; a method has one a file, and so has everything else. `python scripts/size.py`
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEART = "core"
HEART_LIMIT = 2500  # lines together; 2,200 were aimed at
METHODS = (
    "drafters",
    "strategies",
    "rules",
    "rows",
    "warp",
    "rewards",
    "constraints",
    "diffusion",
    "kv",
)
FILE_LIMITS = {HEART: 300, **dict.fromkeys(METHODS, 220)}  # lines of a file, by folder
FILE_LIMIT = 500  # of a file anywhere else
COLUMNS = 100


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def over(root: Path = ROOT) -> list[str]:
    """One sentence for every broken budget."""
    package = root / "foretell"
    found = []
    heart = sum(lines(path) for path in (package / HEART).glob("*.py"))
    if heart > HEART_LIMIT:
        excess = heart - HEART_LIMIT
        found.append(f"the heart has {heart} lines, {excess} over its budget of {HEART_LIMIT}")
    for path in sorted(package.rglob("*.py")):
        limit = FILE_LIMITS.get(path.relative_to(package).parts[0], FILE_LIMIT)
        if (size := lines(path)) > limit:
            found.append(f"{path.relative_to(root)} has {size} lines; there it may have {limit}")
        text = path.read_text("utf-8").splitlines()
        if wide := [number for number, line in enumerate(text, 1) if len(line) > COLUMNS]:
            place = f"{path.relative_to(root)}:{wide[0]}"
            found.append(f"{place} is wider than {COLUMNS} columns, as are {len(wide) - 1} more")
    return found


def main() -> int:
    package = ROOT / "foretell"
    folders: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        folders.setdefault(parts[0] if len(parts) > 1 else "", []).append(path)
    total = 0
    for folder in sorted(folders, key=lambda name: (name != HEART, name)):
        sizes = {path: lines(path) for path in folders[folder]}
        budget = f", budget {HEART_LIMIT}" if folder == HEART else ""
        limit = FILE_LIMITS.get(folder, FILE_LIMIT)
        print(f"{folder or 'foretell'}/  {sum(sizes.values())} lines{budget}, {limit} a file")
        for path in sorted(sizes, key=lambda path: (-sizes[path], path.name)):
            print(f"  {sizes[path]:5}  {path.relative_to(package)}")
        total += sum(sizes.values())
    print(f"{total:7}  in all")
    problems = over()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
