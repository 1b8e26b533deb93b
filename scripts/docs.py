"""Writes everything in the documentation that the code already says.

    python scripts/docs.py [--check]

From the methods' cards: a page a folder of methods, their index and their part of the site's
navigation (scripts/method_pages.py). From the command line: its options
(scripts/option_tables.py). From scripts/house.py: the table of layers in docs/tour.md. From
dev/measured: the tables of figures in the README, on docs/index.md and in docs/choose.md, what
experiments found about each method, and in docs/models.md who computes which family. From the
headings of dev/LOG.md: its index. `--check` writes nothing and fails where a file differs, or where
figures rest on a default, a shipped head or a backend that has changed since (scripts/basis.py).
Nothing here imports torch, so it is quick.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import basis  # noqa: E402
import figure_tables  # noqa: E402
import house  # noqa: E402
from comparison import document  # noqa: E402
from comparison import pages as figure_pages  # noqa: E402
from method_pages import MADE, method_pages, navigation, read_cards, table  # noqa: E402
from option_tables import OptionTables  # noqa: E402

from foretell.errors import ForetellError  # noqa: E402

# Tables that scripts/figures.py measures: their page, and what makes them of their document.
SHOWN = {
    "batch": ("docs/batch.md", figure_tables.batch),
    "draft": ("docs/choose.md", figure_tables.beside_plain),
    "kv": ("docs/choose.md", figure_tables.kv),
    "never-slower": ("docs/choose.md", figure_tables.never_slower),
    "never-slower-16": ("docs/choose.md", figure_tables.never_slower),
    "never-slower-4": ("docs/choose.md", figure_tables.never_slower),
    "serving": ("docs/serving.md", figure_tables.serving),
}


def real() -> dict[str, Any]:
    """What scripts/compare.py found on a real model."""
    return document.read(ROOT / "dev" / "measured" / "real.json")


def families() -> str:
    """The table of who computes which family in which number format (scripts/model_table.py)."""
    measured = json.loads((ROOT / "dev" / "measured" / "models.json").read_text("utf-8"))
    formats = list(next(iter(measured["families"].values())))
    rows, notes = [], []
    for family, cells in measured["families"].items():
        reasons = list(dict.fromkeys(cell["reason"] for cell in cells.values() if cell["reason"]))
        shown = [cells[name]["by"] for name in formats]
        rows.append([f"`{family}`", *(f"**{by}**" if by == "native" else by for by in shown)])
        if "native" not in shown and reasons:
            notes.append(f"- `{family}`: {reasons[0]}")
    about = measured["about"]
    head = (
        f"Tiny random models of each family, loaded by `foretell.load(folder, dtype=...)` on a CPU "
        f"({about['system']}, kernels {about['kernels']}, transformers {about['transformers']}), "
        "`python scripts/model_table.py`."
    )
    grid = table(["`model_type`", *formats], rows)
    said = "Why not the C library, where the family is not one of recurrent layers:"
    return "\n".join([head, "", grid, "", said, "", *notes])


def layers() -> str:
    """The table of the package's layers, from the lowest on."""
    rows = []
    for number, (name, purpose) in enumerate(house.LAYERS, 1):
        shown = f"`{name}`" if name.endswith(".py") else f"`{name}/`"
        rows.append([str(number), shown, purpose])
    return table(["", "folder or file", "what it is for"], rows)


def log_index(text: str) -> str:
    """The entries of dev/LOG.md, from their headings: date, subject and verdict."""
    rows = []
    for heading in re.findall(r"^## (.+)$", text, re.M):
        entry = re.fullmatch(r"(\d{4}-\d\d-\d\d): (.+) \((kept|dropped|open)\)", heading)
        if not entry:
            raise SystemExit(f"dev/LOG.md: write {heading!r} as 'DATE: SUBJECT (VERDICT)'")
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        rows.append([entry[1], f"[{entry[2]}](#{anchor})", entry[3]])
    return table(["date", "subject", "verdict"], rows)


def between(path: Path, name: str, text: str, current: str | None = None) -> str:
    """The file's text with what stands between the markers `name` and `/name` replaced."""
    whole = path.read_text("utf-8") if current is None else current
    opening, closing = (
        (f"# <{name}>", f"# </{name}>")
        if path.suffix == ".yml"
        else (f"<!-- {name} -->", f"<!-- /{name} -->")
    )
    before, found, rest = whole.partition(opening + "\n")
    _, ends, after = rest.partition(closing)
    if not found or not ends:
        raise SystemExit(f"{path}: the markers {opening} and {closing} are missing; put them back")
    indent = before[len(before.rstrip(" ")) :]
    text = f"{text}\n{indent}" if path.suffix == ".yml" else f"\n{text}\n\n"
    return f"{before}{opening}\n{text}{closing}{after}"


def pages() -> dict[Path, str]:
    """Every generated file with the text it should have."""
    every, found, taken = read_cards(), real(), basis.taken()
    wanted = method_pages(every, found)
    readme = ROOT / "README.md"
    choose = ROOT / "docs" / "choose.md"
    landing = ROOT / "docs" / "index.md"
    stated = basis.stated(taken["engines"])
    wanted[readme] = between(readme, "figures", f"{figure_pages.summary(found)}\n\n{stated}")
    wanted[landing] = between(landing, "figures", f"{figure_pages.short(found)}\n\n{stated}")
    wanted[choose] = between(choose, "figures", f"{figure_pages.methods(found)}\n\n{stated}")
    text = f"{MADE.format('dev/measured/real.json')}\n\n{figure_pages.page(found)}"
    wanted[ROOT / "docs" / "figures.md"] = f"{text}\n{stated}\n"
    for name in SHOWN.keys() & taken.keys():
        place, show = SHOWN[name]
        measured = figure_tables.document(name)
        assert measured is not None, f"dev/measured/{name}.json is missing"
        tables = f"{show(measured)}\n\n{basis.stated(taken[name])}"
        path = ROOT / place
        wanted[path] = between(path, f"figure {name}", tables, wanted.get(path))
    models = ROOT / "docs" / "models.md"
    wanted[models] = between(models, "families", families())
    tour = ROOT / "docs" / "tour.md"
    wanted[tour] = between(tour, "layers", layers())
    line, options = ROOT / "docs" / "cli.md", OptionTables()
    wanted[line] = between(line, "shared options", options.shared_tables())
    for name in options.options:
        wanted[line] = between(line, f"options of {name}", options.own_table(name), wanted[line])
    log = ROOT / "dev" / "LOG.md"
    wanted[log] = between(log, "index", log_index(log.read_text("utf-8")))
    site = ROOT / "mkdocs.yml"
    wanted[site] = between(site, "methods", navigation(every))
    return wanted


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    if arguments and not check:
        print("usage: scripts/docs.py [--check]", file=sys.stderr)
        return 2
    try:
        wanted = pages()
    except ForetellError as error:  # of a card
        print(f"error: {error}", file=sys.stderr)
        return 2
    stale = [p for p in (ROOT / "docs" / "methods").rglob("*.md") if p not in wanted]
    changed = [p for p, text in wanted.items() if not p.is_file() or p.read_text("utf-8") != text]
    if check:
        for path in changed + stale:
            name = path.relative_to(ROOT)
            message = f"error: {name} differs from the code; run `python scripts/docs.py`"
            print(message, file=sys.stderr)
        late = basis.expired(basis.taken(), basis.basis())
        for sentence in late:
            print(f"error: {sentence}", file=sys.stderr)
        return 1 if changed or stale or late else 0
    for path in stale:
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], "utf-8")
    print(f"{len(wanted)} files, {len(changed)} written, {len(stale)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
