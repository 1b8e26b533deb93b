"""The words of the package: how much of it is named vaguely, and limits that only fall.

    python scripts/words.py

prints shares in percent of names that are bound (assigned, or arguments), of functions, and of
docstrings. A vague name is a participle, an adjective or a pronoun: it does not say what is found,
kept or known.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VAGUE = set(
    """found kept known made given held left seen wanted told whole one own other others first last
    most least best what asked done chosen drawn taken read written behind before about after beside
    all both same new old next several many more less few such these those each another whose how
    who why where placed shown said set put lost spent ended ready needed wished built cut grown
    moved answered judged scored rated listed named joined merged shared stored cached fitted
    allowed refused evicted inside outside apart alone alike away together free full open high low
    far near wide long short small large great right wrong good bad common usual certain
    sure""".split()
)
ELLIPTIC = set(
    "What These Those Of It One As Such Its They In Who With By So Where That This".split()
)
LIMITS = {  # lower one when the package stands below it, and raise none
    "vague names": 1.5,
    "vague functions": 1.0,
    "elliptic docstrings": 1.0,
    "function names that three modules share": 16,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_bound(tree: ast.AST) -> Iterator[str]:
    """Every name that is assigned or an argument, without leading underscores."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id.lstrip("_")
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg.lstrip("_")


def is_elliptic(docstring: str) -> bool:
    """Whether a docstring begins with a word that stands for something said elsewhere."""
    first = re.split(r"\W", docstring.strip())[0]
    return first in ELLIPTIC or docstring.startswith("The same")


def measure_words(package: Path) -> dict[str, float]:
    """Shares in percent, and the count of function names that three modules have."""
    names: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    docstrings: list[str] = []
    modules_of: defaultdict[str, set[Path]] = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        names.update(name for name in names_bound(tree) if name)
        for node in ast.walk(tree):
            if isinstance(node, Function) and not node.name.startswith("__"):
                functions[node.name.lstrip("_")] += 1
            if isinstance(node, Function | ast.ClassDef) and (text := ast.get_docstring(node)):
                docstrings.append(text)
        for node in tree.body:
            if isinstance(node, Function) and not node.name.startswith("_"):
                modules_of[node.name].add(path)
    return {
        "vague names": share_of(names, VAGUE),
        "vague functions": share_of(functions, VAGUE),
        "elliptic docstrings": 100 * sum(map(is_elliptic, docstrings)) / max(1, len(docstrings)),
        "function names that three modules share": sum(len(m) >= 3 for m in modules_of.values()),
    }


def share_of(counts: Counter[str], words: set[str]) -> float:
    """The share in percent of these words."""
    return 100 * sum(counts[word] for word in words) / max(1, counts.total())


def above_limits(package: Path = ROOT / "foretell") -> list[str]:
    """One sentence for every limit that is broken."""
    return [
        f"{what}: {value:.1f}, and {LIMITS[what]} at most"
        for what, value in measure_words(package).items()
        if value > LIMITS[what]
    ]


def main() -> int:
    for what, value in measure_words(ROOT / "foretell").items():
        print(f"{value:6.1f}  {what} (at most {LIMITS[what]})")
    problems = above_limits()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
