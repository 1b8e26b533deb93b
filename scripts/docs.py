"""Writes everything in the documentation that the code already says.

    python scripts/docs.py [--check]

From the methods' cards: a page a method, the index of methods and the site's navigation. From the
modules' docstrings: the tree in docs/design.md. From the command line: its options. From
dev/measured: the tables of figures in the README, on docs/index.md and in docs/choose.md, and what
experiments found about each method, on its page. From the headings of dev/LOG.md: its index.
`--check` writes nothing and fails where a file differs, or where figures rest on a default, a
shipped head or an executor that has changed since (scripts/basis.py). Nothing here imports torch,
so it is quick.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import basis  # noqa: E402
import figure_tables  # noqa: E402
from comparison import document  # noqa: E402
from comparison import pages as figure_pages  # noqa: E402
from size import HEART  # noqa: E402

from foretell import registry  # noqa: E402
from foretell.cards import LABELS, Card, card  # noqa: E402
from foretell.cli import app  # noqa: E402

TITLES = {
    "drafter": "Drafters",
    "strategy": "Strategies",
    "rule": "Verification rules",
    "rows": "Row sources",
    "warp": "Warpers",
    "reward": "Rewards",
    "constraint": "Constraints",
    "diffusion": "Diffusion",
    "kv": "KV policies",
}
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
# Of a method without findings.
UNKNOWN = "It was not measured for this page: what it gains or loses on a real model is not known."
FINDINGS = ROOT / "dev" / "measured" / "methods.toml"
MADE = "<!-- Made by scripts/docs.py from {}: edit that file instead. -->"


@dataclass(frozen=True)
class Field:
    name: str
    type: str
    default: str
    comment: str


def cards() -> list[Card]:
    """Of this package's own methods; those of other packages do not belong into our pages."""
    pairs = sorted(key for key, path in registry.files().items() if path.is_relative_to(ROOT))
    return [
        card(name, kind)
        for kind, name in sorted(pairs, key=lambda p: (list(TITLES).index(p[0]), p[1]))
    ]


def class_of(path: Path, name: str) -> ast.ClassDef:
    module = ast.parse(path.read_text("utf-8"))
    return next(
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name
    )


def method_class(card: Card) -> ast.ClassDef:
    return class_of(card.file, registry.class_name(card.name))


def fields(card: Card) -> list[Field]:
    """The hyper-parameters of a method."""
    return fields_of(card.file, registry.class_name(card.name))


def fields_of(path: Path, name: str) -> list[Field]:
    """The fields of a dataclass as its source has them, with the comment behind or above each."""
    text = path.read_text("utf-8").splitlines()
    found = []
    for node in class_of(path, name).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is not None
        ):
            # Offsets of `ast` count bytes.
            rest = text[(node.end_lineno or 1) - 1].encode()[node.end_col_offset or 0 :].decode()
            comment = rest.partition("#")[2].strip() or above(text[: node.lineno - 1])
            found.append(
                Field(
                    node.target.id, ast.unparse(node.annotation), ast.unparse(node.value), comment
                )
            )
    return found


def above(lines: Sequence[str]) -> str:
    """The comment lines that these lines end with, as one text."""
    found: list[str] = []
    for line in reversed(lines):
        if not line.strip().startswith("#"):
            break
        found.insert(0, line.strip().removeprefix("#").strip())
    return " ".join(found)


def attribute(card: Card, name: str) -> Any:
    """What the method's class sets in its body, as in `draws = whole = True`; None: nothing."""
    for node in method_class(card).body:
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if name in names:
                return ast.literal_eval(node.value)
    return None


def draws(card: Card) -> bool:
    """Whether the drafter makes nodes that carry a law: its file names it, or says `draws`."""
    tree = ast.parse(card.file.read_text("utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return bool(names & {"Law", "draws"})


def suits(rule: Card, drawn: bool) -> str:
    """In words, whether a rule verifies the trees of a drafter that draws its tokens, or chooses
    them.
    """
    if rule.needs.startswith("any"):
        return "yes"
    if "not drawn" in rule.needs:
        return "only at temperature 0" if drawn else "yes"
    return f"where a tree is: {rule.needs}" if drawn else "only at temperature 0"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def linked(text: str) -> str:
    """arXiv numbers as links."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cell(c) for c in row) + " |" for row in rows)])


# What the model `dlm-lists` knows, for a shell.
LISTS = (
    "$'Write the list from its end to its beginning.\\n\\n"
    'List: ["Ida", "Otto", "Flora"]\\nAnswer:\''
)
FLAGS = {kind: kind for kind in ("kv", "rows", "warp", "constraint")}  # of others: method


def command(card: Card) -> str:
    """A command line that tries the method."""
    options = f"--{FLAGS.get(card.kind, 'method')} {card.name} --compare"
    if card.kind == "rule":
        options = f"--method {partner(card)}rule={card.name} --temperature 0.8"
    elif card.kind == "reward":
        options = f"--method best-of --reward {card.name}"
    elif card.kind == "diffusion":
        options = f"--model dlm-lists --method {card.name}"
    options = card.trial or options
    prompt = LISTS if "--model dlm-lists" in options else '"def add(a, b):"'
    raw = "--raw " if "--model smollm2" in options else ""  # code that is continued, no question
    return f"foretell generate {options} {raw}{prompt}"


def partner(rule: Card) -> str:
    """The beginning of a spec whose drafts this rule can verify."""
    if "independently" in rule.needs:
        return "draft:drafts=3,"
    drawn = "drawn" in rule.needs and "not drawn" not in rule.needs
    return "draft:" if drawn else "token-recycling:"


def real() -> dict[str, Any]:
    """What scripts/compare.py found on a real model."""
    return document.read(ROOT / "dev" / "measured" / "real.json")


@cache
def findings() -> dict[str, dict[str, list[dict[str, str]]]]:
    """What experiments found, by kind and name of a method; each with its entry in dev/LOG.md."""
    log = (ROOT / "dev" / "LOG.md").read_text("utf-8")
    entries = set(re.findall(r"^## (.+) \(\w+\)$", log, re.M))
    found: dict[str, Any] = tomllib.loads(FINDINGS.read_text("utf-8"))
    for kind, methods in found.items():
        for name, notes in methods.items():
            if (kind, name) not in registry.files():
                raise SystemExit(f"{FINDINGS.name}: there is no {kind} {name}")
            for note in notes:
                if note["log"] not in entries:
                    raise SystemExit(f"{FINDINGS.name}: dev/LOG.md has no entry {note['log']!r}")
    return found


def measured(card: Card) -> list[str]:
    """What was found for the method: in experiments, and beside peers with its defaults."""
    notes = findings().get(card.kind, {}).get(card.name, [])
    parts = []
    if notes:
        parts = ["On SmolLM2-135M-Instruct and two cores of a CPU, unless it is said otherwise:"]
        parts.append("\n".join(f"- {note['found']} ({note['log'][:10]})" for note in notes))
    head, rows = figure_pages.method_rows(real(), card.name)
    if rows:
        parts += [table(head, rows), figure_pages.circumstances(real())]
    if notes:
        entries = "; ".join(dict.fromkeys(note["log"] for note in notes))
        parts.append(f"More in `dev/LOG.md`, {entries}.")
    return ["## Measured", *(parts or [UNKNOWN])]


def page(card: Card, every: list[Card]) -> str:
    source = card.file.relative_to(ROOT).as_posix()
    named = ("kind", *(label.lower() for label in LABELS if label != "Differs"))
    labels = {name: linked(getattr(card, name)) for name in named}
    if card.temperature:
        labels["temperature"] = f"{card.temperature:g} where none is given; 0 is refused"
    labels["source"] = f"`{source}`"
    parts = [MADE.format(source), f"# {card.name}", card.summary, card.prose]
    parts.append(table(["", ""], [[f"**{name.title()}**", text] for name, text in labels.items()]))
    parts.append("## Departures from the paper")
    parts.append("\n".join(f"- {linked(item)}" for item in card.differs))
    parts += field_section(card)
    if card.kind == "drafter":
        parts += rule_section(card, every)
    parts += measured(card)
    parts.append("## Try it")
    parts.append(f"```bash\n{command(card)}\n```")
    if card.kind not in (*registry.BESIDE, "diffusion"):  # which audit does not run
        parts.append("What holds for it on your model and machine:")
        parts.append(f"```bash\nforetell audit --method {card.name}\n```")
    return "\n\n".join(p for p in parts if p) + "\n"


def field_section(card: Card) -> list[str]:
    """The hyper-parameters."""
    parts = ["## Fields", ast.get_docstring(method_class(card)) or ""]
    rows = [[f"`{f.name}`", f"`{f.type}`", f"`{f.default}`", f.comment] for f in fields(card)]
    if rows:
        parts.append(table(["field", "type", "default", ""], rows))
    return parts


def rule_section(card: Card, every: list[Card]) -> list[str]:
    """Which rules verify the drafter's trees."""
    drawn = draws(card)
    how = "Its tokens are chosen by a rule, not drawn"
    if drawn:
        how = "Its tokens are drawn, each node carrying the law it was drawn from"
    if own := attribute(card, "rule"):
        how += f", and unless told otherwise [`{own}`](../rule/{own}.md) verifies its trees"
    text = f"{how}. At temperature 0 every rule is the walk; above it, `rule=` takes:"
    rows = []
    for rule in every:
        if rule.kind == "rule":
            link = f"[`{rule.name}`](../rule/{rule.name}.md)"
            rows.append([link, suits(rule, drawn), rule.guarantee])
    return ["## Rules", text, table(["rule", "verifies its trees", "guarantee"], rows)]


def index(every: list[Card]) -> str:
    parts = [
        MADE.format("the methods' cards"),
        "# Methods",
        "One file a method; each page is made from that file.",
    ]
    for kind, title in TITLES.items():
        rows = [
            [f"[`{c.name}`]({kind}/{c.name}.md)", c.summary, c.guarantee]
            for c in every
            if c.kind == kind
        ]
        if rows:
            parts += [f"## {title}", table(["name", "what it does", "guarantee"], rows)]
    return "\n\n".join(parts) + "\n"


def navigation(every: list[Card]) -> str:
    lines = ["  - Methods:", "      - methods/index.md"]
    for kind, title in TITLES.items():
        if chosen := [c for c in every if c.kind == kind]:
            lines.append(f"      - {title}:")
            lines += [f"          - methods/{kind}/{c.name}.md" for c in chosen]
    return "\n".join(lines)


def phrase(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.:;])\s(?=[A-Z`])", first)[0].rstrip(".:;") if first else ""


def tree() -> str:
    """Every module with its phrase, the heart first."""
    rows = [("foretell/", phrase(ROOT / "foretell" / "__init__.py")), *inside(ROOT / "foretell", 1)]
    rows.append(("  assets/", "The embedded pair of models, each with its model card"))
    rows.append(("scripts/", "What `make check` and `make docs` call"))
    rows += [(f"  {p.name}", phrase(p)) for p in sorted((ROOT / "scripts").glob("*.py"))]
    rows.append(("tests/", "The laws, and a file a module or method"))
    rows.append(("docs/", "These pages; those of the methods are made from their cards"))
    rows.append(("dev/LOG.md", "Experiments with their numbers, the failed ones kept"))
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, 92) or [""]
        lines.append(f"{name:<28} {wrapped[0]}".rstrip())
        lines += [" " * 29 + more for more in wrapped[1:]]
    return "\n".join(["```", *lines, "```"])


def inside(folder: Path, level: int) -> list[tuple[str, str]]:
    """A package's modules and packages with their phrases; private modules are left out."""
    indent = "  " * level
    rows = [(f"{indent}{path.name}", phrase(path)) for path in sorted(folder.glob("[!_]*.py"))]
    packages = [path.parent for path in folder.glob("*/__init__.py")]
    for package in sorted(packages, key=lambda path: (path.name != HEART, path.name)):
        rows.append((f"{indent}{package.name}/", phrase(package / "__init__.py")))
        rows += inside(package, level + 1)
    return rows


def commands() -> dict[str, Any]:
    """Every command of the command line by its full name: `generate`, `train lm`."""
    found: dict[str, Any] = {}

    def walk(command: Any, name: str) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            found[name] = command
        for key, one in (inner or {}).items():
            walk(one, f"{name} {key}".strip())

    walk(typer.main.get_command(app), "")
    return found


def options(command: Any) -> str:
    """The table of a command's options."""
    rows = []
    for p in command.params:
        flag = p.default is False
        plain = p.default in (None, "") or isinstance(p.default, bool)
        default = "" if plain and not p.required else "required" if p.required else f"`{p.default}`"
        takes = f" {p.metavar}" if p.metavar else ""  # a unit, say, or a form
        names = " ".join(f"`{o}{takes}`" for o in (*p.opts, *p.secondary_opts))
        if not any(o.startswith("-") for o in p.opts):
            names = f"`{p.metavar or p.name.upper()}`"
        rows.append([names, "off" if flag else "on" if p.default is True else default, p.help])
    return table(["option", "default", "meaning"], rows)


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
    every = cards()
    folder = ROOT / "docs" / "methods"
    wanted = {folder / card.kind / f"{card.name}.md": page(card, every) for card in every}
    wanted[folder / "index.md"] = index(every)
    readme = ROOT / "README.md"
    choose = ROOT / "docs" / "choose.md"
    landing = ROOT / "docs" / "index.md"
    found, taken = real(), basis.taken()
    stated = basis.stated(taken["engines"])
    wanted[readme] = between(readme, "figures", f"{figure_pages.summary(found)}\n\n{stated}")
    wanted[landing] = between(landing, "figures", f"{figure_pages.short(found)}\n\n{stated}")
    wanted[choose] = between(choose, "figures", f"{figure_pages.methods(found)}\n\n{stated}")
    text = f"{MADE.format('dev/measured/real.json')}\n\n{figure_pages.page(found)}"
    wanted[ROOT / "docs" / "figures.md"] = f"{text}\n{stated}\n"
    for name in SHOWN.keys() & taken.keys():
        place, show = SHOWN[name]
        document = figure_tables.document(name)
        assert document is not None, f"dev/measured/{name}.json is missing"
        tables = f"{show(document)}\n\n{basis.stated(taken[name])}"
        path = ROOT / place
        wanted[path] = between(path, f"figure {name}", tables, wanted.get(path))
    design = ROOT / "docs" / "design.md"
    wanted[design] = between(design, "tree", tree())
    line = ROOT / "docs" / "cli.md"
    wanted[line] = line.read_text("utf-8")
    for name, command in commands().items():
        wanted[line] = between(line, f"options of {name}", options(command), wanted[line])
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
    wanted = pages()
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
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], "utf-8")
    print(f"{len(wanted)} files, {len(changed)} written, {len(stale)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
