"""The rules that the folders of the package keep, read from its files: see docs/design.md.

    python scripts/house.py

prints what is broken. LAYERS is the one list: a module imports what stands in its own layer or in
one before it, so that whoever reads from the top has read all that a file needs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from foretell import registry  # noqa: E402

PACKAGE = "foretell"
# (folder or file, what it is for), from the lowest on. A folder within one has a line of its own
# where it stands elsewhere than its parent.
LAYERS = (
    ("errors.py", "what a user can be told"),
    ("registry.py", "methods by their files"),
    ("cards.py", "what a method says of itself"),
    ("lazy.py", "names that are imported when they are used"),
    ("progress.py", "how far something is"),
    ("native", "the C library: products, attention, states, whole steps"),
    ("ops", "functions of tensors and files that several folders need"),
    ("cache", "the rows that a model keeps of a text, and who may change them"),
    ("core", "the protocols that every method reads: trees, asks, requests, models, drafters"),
    ("verification", "which drafted tokens are accepted"),
    ("speculation", "how much is drafted, by whom, and when it pays"),
    ("processors", "logits processors"),
    ("guidance", "logits made of several models or layers"),
    ("rewards", "what a text is worth"),
    ("kv", "cache policies: the base of their settings"),
    ("kv/store", "rows in fewer bits, or in other memory"),
    ("kv/select", "rows that are read, of all that are held"),
    ("kv/evict", "rows that are dropped"),
    ("models", "what is common to models; who may compute them"),
    ("models/decoder", "decoder-only models, layer by layer"),
    ("models/gguf", ".gguf files"),
    ("models/quantized", "folders of matrices in few bits"),
    ("models/recurrent", "models with recurrent layers"),
    ("models/encoder_decoder", "models that read a source"),
    ("models/diffusion", "models that fill masks"),
    ("diffusion", "in which order masks are filled"),
    ("diffusion/cache", "which rows of a masked text are computed again"),
    ("drafters", "who drafts"),
    ("drafters/lookup", "drafts that are looked up"),
    ("drafters/heads/networks", "networks that read a target's hidden states"),
    ("drafters/heads/formats", "folders of heads as others publish them"),
    ("drafters/heads", "drafts of such networks"),
    ("kv/encoded", "rows that an encoder makes of contexts"),
    ("drafters/model", "drafts of a draft model"),
    ("drafters/own", "drafts of parts of the target"),
    ("drafters/masked", "drafts of models that fill masks"),
    ("constraints/schema", "JSON schemas in the words of the grammar compiler"),
    ("constraints", "grammars, and what a language server knows"),
    ("spec.py", "methods from text"),
    ("engine", "who runs when: requests, forwards, admission, prefix reuse"),
    ("strategies", "other ways than drafting and verifying"),
    ("strategies/search", "searches over beams and trees"),
    ("strategies/lookahead", "tokens chosen by what would follow"),
    ("strategies/samples", "whole answers, compared or refined"),
    ("strategies/parallel", "several tokens or models at once"),
    ("backends", "who computes a forward"),
    ("testing", "toys and recorders for laws of one's own"),
    ("api", "what a Python program calls"),
    ("loading", "models by name, folder or file"),
    ("bench/peers", "other engines"),
    ("bench/report", "figures as pages"),
    ("bench", "measurements side by side"),
    ("bench/suites", "tasks with answers that can be checked"),
    ("train", "what trainers share; draft models and language models"),
    ("train/heads", "heads, and what is trained as they are"),
    ("train/diffusion", "models that fill masks"),
    ("train/preferences", "models that learn which text is better"),
    ("train/caches", "what cache policies need of a model"),
    ("longbench", "long contexts"),
    ("lab", "what a draft model's tokens come to"),
    ("audit", "claims proved on a user's machine"),
    ("serve", "HTTP"),
    ("batch", "files of requests"),
    ("cluster", "several processes"),
    ("cli", "the command line"),
    ("__main__.py", "python -m foretell"),
)
# Annotations that name what stands above: (module, module).
ANNOTATIONS = {("cache/cache.py", "core/types.py"), ("cache/plan.py", "core/types.py"),
               ("core/context.py", "speculation/costs.py")}  # fmt: skip
OPS_IMPORT = {"numpy", "torch", "safetensors", "foretell.native", "foretell.errors", "foretell.ops"}
FILES_IN_A_FOLDER = 30
FILES_ON_TOP = 8


@dataclass(frozen=True)
class Import:
    """Of one module of the package by another, as paths below the package."""

    file: str
    imported: str
    for_types: bool


def python_files(package: Path) -> dict[str, str]:
    """Dotted name -> path below the package, of every module."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        parts = (PACKAGE, *place.with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = place.as_posix()
    return found


@cache
def imports(package: Path) -> list[Import]:
    """Every import of the package by itself, read once; its own `__init__.py` imports names when
    used.
    """
    files = python_files(package)
    found = []
    for file in files.values():
        if file == "__init__.py":
            continue
        for node, for_types in statements(ast.parse((package / file).read_text("utf-8"))):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                name = name if name in files else str(node.module)
                if name in files and files[name] != "__init__.py":
                    found.append(Import(file, files[name], for_types))
    return found


def statements(node: ast.AST, for_types: bool = False) -> Iterator[tuple[ast.ImportFrom, bool]]:
    """(import, whether it is below `if TYPE_CHECKING:`) of all code below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            yield child, for_types
        below = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
        yield from statements(child, for_types or below)


def layer_of(file: str) -> int:
    """The place in LAYERS of a file's folder, or of the nearest folder above that is listed."""
    names = [name for name, _ in LAYERS]
    places = [file, *(parent.as_posix() for parent in Path(file).parents)]
    return next((names.index(place) for place in places if place in names), -1)


def upward(package: Path) -> list[str]:
    """Rule 1: imports of what stands in a higher layer, and files that no layer has."""
    lost = [file for file in python_files(package).values() if layer_of(file) < 0]
    found = [f"{file} is in no layer of scripts/house.py" for file in lost if file != "__init__.py"]
    for one in dict.fromkeys(imports(package)):
        allowed = one.for_types and (one.file, one.imported) in ANNOTATIONS
        if layer_of(one.imported) > layer_of(one.file) and not allowed:
            found.append(f"{one.file} imports {one.imported}, which stands above it")
    return found


def low_imports(package: Path) -> list[str]:
    """Rule 2: what ops/ imports besides Python itself, tensors, the C library and errors."""
    found = []
    for path in sorted((package / "ops").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else names
            for name in names:
                top = ".".join(name.split(".")[: 2 if name.startswith(PACKAGE) else 1])
                if top not in OPS_IMPORT and top not in sys.stdlib_module_names:
                    found.append(f"ops/{path.name} imports {name}")
    return found


def lonely(package: Path) -> list[str]:
    """Rule 3: modules of ops/ that one folder alone imports, beside which they would lie."""
    users: dict[str, set[str]] = {}
    for path in (package / "ops").glob("[!_]*.py"):
        users[f"ops/{path.name}"] = set()
    for one in imports(package):
        if one.imported in users and not one.file.startswith("ops/"):
            users[one.imported].add(str(Path(one.file).parent))
    return [
        f"{file} is imported by {', '.join(folders) or 'nobody'} alone"
        for file, folders in sorted(users.items())
        if len(folders) < 2
    ]


def siblings(package: Path) -> list[str]:
    """Rule 4: methods that import another method."""
    methods = {path.relative_to(package).as_posix() for _, path in registry.methods_below(package)}
    return [
        f"{one.file} imports the method {one.imported}"
        for one in dict.fromkeys(imports(package))
        if one.file in methods and one.imported in methods
    ]


def crowded(package: Path) -> list[str]:
    """Rule 5: folders with too many files."""
    found = []
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        count = len(list(folder.glob("*.py")))
        most = FILES_ON_TOP if folder == package else FILES_IN_A_FOLDER
        if count > most:
            found.append(f"{folder.relative_to(package)} has {count} files; {most} are enough")
    return found


def folder_circles(package: Path) -> list[list[str]]:
    """Folders each of which imports, directly or not, all others of its group."""
    graph: dict[str, set[str]] = {}
    for one in imports(package):
        here, there = (room(file) for file in (one.file, one.imported))
        if here != there and not (one.for_types and (one.file, one.imported) in ANNOTATIONS):
            graph.setdefault(here, set()).add(there)
            graph.setdefault(there, set())
    return circles(graph)


def room(file: str) -> str:
    """A file's folder; those on top stand for themselves."""
    return Path(file).parent.as_posix() if "/" in file else file


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes each of which reaches all others of its group."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        queue = [start]
        while queue:
            for name in graph[queue.pop()] - seen:
                seen.add(name)
                queue.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {tuple(sorted(n for n in reach[name] if name in reach[n])) for name in graph}
    return [list(group) for group in sorted(groups) if group]


def broken(package: Path = ROOT / PACKAGE) -> list[str]:
    """One sentence for every breach."""
    found = [*upward(package), *low_imports(package), *lonely(package), *siblings(package)]
    found += crowded(package)
    found += [f"a circle of folders: {', '.join(group)}" for group in folder_circles(package)]
    return found


def main() -> int:
    problems = broken()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
