"""Prints the size of every file of the package and fails where a budget is broken.

The heart is what a reader of one method must hold in mind: all that the drafter `ngram` imports,
directly or not. It has a budget as a whole; every file has one by its folder.
`python scripts/size.py`
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from foretell import registry  # noqa: E402

HEART = "core"
METHOD = "drafters/lookup/ngram.py"  # whose imports are the heart
REACH_LIMIT = 4500  # lines that METHOD imports, directly or not
METHOD_LIMIT = 280  # lines of a file with a card
FILE_LIMIT = 500  # of a file anywhere else
COLUMNS = 100


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def is_type_checking(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:`, whose imports do not run."""
    test = getattr(node, "test", None)
    return isinstance(node, ast.If) and isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def imported_names(node: ast.AST) -> Iterator[str]:
    """The dotted names that the code below a node imports, `a.b.c` for `from a.b import c`."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        yield from imported_names(child)


def reach(path: Path, root: Path = ROOT) -> set[Path]:
    """The files of the package that a file imports, directly or not, and the file itself."""
    found, waiting = {path}, [path]
    while waiting:
        for name in imported_names(ast.parse(waiting.pop().read_text("utf-8"))):
            parts = name.split(".")
            module, parent = root.joinpath(*parts), root.joinpath(*parts[:-1])
            places = [place.with_suffix(".py") for place in (module, parent)]
            places += [place / "__init__.py" for place in (module, parent)]
            known = [place for place in places if parts[0] == "foretell" and place.is_file()]
            if known and known[0] not in found:
                found.add(known[0])
                waiting.append(known[0])
    return found


def heart(root: Path = ROOT) -> int:
    """Lines of all that METHOD reaches."""
    return sum(lines(path) for path in reach(root / "foretell" / METHOD, root))


def over(root: Path = ROOT) -> list[str]:
    """One sentence for every broken budget."""
    package = root / "foretell"
    found = []
    if (size := heart(root)) > REACH_LIMIT:
        excess = size - REACH_LIMIT
        found.append(f"{METHOD} reaches {size} lines, {excess} over the budget of {REACH_LIMIT}")
    methods = {path for _, path in registry.methods_below(package)}
    for path in sorted(package.rglob("*.py")):
        limit = METHOD_LIMIT if path in methods else FILE_LIMIT
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
        print(f"{folder or 'foretell'}/  {sum(sizes.values())} lines")
        for path in sorted(sizes, key=lambda path: (-sizes[path], path.name)):
            print(f"  {sizes[path]:5}  {path.relative_to(package)}")
        total += sum(sizes.values())
    print(f"{total:7}  in all")
    print(f"{heart():7}  reached by {METHOD}, budget {REACH_LIMIT}")
    problems = over()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
