"""Prints the size of every file of the package and fails where a budget is broken: `python scripts/size.py`.

The heart is what a reader must hold in mind, so it has a budget as a whole; a method has one a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEART = "types tree rng sampling verify cache model drafter strategy policy engine registry errors".split()
HEART_LIMIT = 1500
METHOD_LIMIT = 220
METHODS = ("drafters", "strategies", "rules", "diffusion", "kv")


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def over(root: Path = ROOT) -> list[str]:
    """One sentence for every broken budget."""
    package = root / "foretell"
    found = []
    heart = sum(lines(package / f"{name}.py") for name in HEART)
    if heart > HEART_LIMIT:
        found.append(f"the heart has {heart} lines, {heart - HEART_LIMIT} over its budget of {HEART_LIMIT}")
    for folder in METHODS:
        for path in sorted((package / folder).glob("[!_]*.py")):
            if (size := lines(path)) > METHOD_LIMIT:
                found.append(f"{path.relative_to(root)} has {size} lines; a method has at most {METHOD_LIMIT}")
    return found


def main() -> int:
    package = ROOT / "foretell"
    sizes = {path.relative_to(package).as_posix(): lines(path) for path in package.rglob("*.py")}
    heart = {f"{name}.py" for name in HEART}
    total = 0
    for title, chosen in (("the heart", heart), ("the rest", set(sizes) - heart)):
        print(title)
        for name in sorted(chosen, key=lambda n: (-sizes[n], n)):
            print(f"  {sizes[name]:5}  {name}")
        part = sum(sizes[name] for name in chosen)
        print(f"  {part:5}  together" + (f", budget {HEART_LIMIT}" if title == "the heart" else ""))
        total += part
    print(f"{total:7}  in all")
    problems = over()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
