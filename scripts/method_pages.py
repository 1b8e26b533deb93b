"""From the methods' cards to docs/methods: a page for each folder of methods, with an anchor for
each method, and an index. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from comparison import pages as figure_pages  # noqa: E402

from foretell import cards, registry  # noqa: E402
from foretell.cards import Card  # noqa: E402
from foretell.core import settings  # noqa: E402

FINDINGS = ROOT / "dev" / "measured" / "methods.toml"
MADE = "<!-- Made by scripts/docs.py from {}: edit that file instead. -->"
UNMEASURED = "Measured: nothing yet."
# A card's line that says no more than this is left out.
NOTHING = ("nothing", "none", "there is no paper")


@dataclass(frozen=True)
class MethodPage:
    """The page of one folder of methods."""

    stem: str  # of its file
    title: str
    about: str
    group: str  # where the navigation has it


# A folder that is not named here has a page all the same, named after it.
PAGES = {
    "drafters/lookup": MethodPage(
        "lookup-drafters",
        "Drafters that look tokens up",
        "Prompt lookup, n-gram lookup, suffix trees and stores of earlier tokens: no model is "
        "asked, so a draft costs next to nothing, and it holds where texts repeat.",
        "Drafters",
    ),
    "drafters/model": MethodPage(
        "model-drafters",
        "Drafters with a draft model",
        "Speculative decoding as it began: a smaller model (`--draft`) drafts a chain or a tree, "
        "and the target verifies it.",
        "Drafters",
    ),
    "drafters/heads": MethodPage(
        "head-drafters",
        "Drafters with a trained head",
        "A small network reads the target's hidden states and drafts. [Training](../train.md) says "
        "how one is made, and [Heads of others](../heads.md) which published ones are read.",
        "Drafters",
    ),
    "drafters/own": MethodPage(
        "self-drafters",
        "Drafters from parts of the target",
        "Self-speculation: the target drafts for itself with some of its layers (early exit), or "
        "with some of its KV entries.",
        "Drafters",
    ),
    "drafters/masked": MethodPage(
        "masked-drafters",
        "Drafters that fill masks",
        "A model that fills masked tokens drafts a whole block in one forward.",
        "Drafters",
    ),
    "verification": MethodPage(
        "verification-rules",
        "Verification rules",
        "Which drafted tokens are accepted. A rule is given to a drafter: `draft:rule=block`.",
        "Verification rules",
    ),
    "strategies": MethodPage(
        "strategies",
        "Strategies of single texts",
        "Ways to decode one text other than drafting and verifying.",
        "Strategies",
    ),
    "strategies/search": MethodPage(
        "beam-search",
        "Beam and tree search",
        "Several beginnings of the answer are kept, extended and compared.",
        "Strategies",
    ),
    "strategies/lookahead": MethodPage(
        "lookahead-strategies",
        "Strategies that look ahead",
        "The next token is chosen by what would follow it.",
        "Strategies",
    ),
    "strategies/samples": MethodPage(
        "sample-strategies",
        "Best-of-n and refinement",
        "Whole answers are sampled, compared, or refined.",
        "Strategies",
    ),
    "strategies/parallel": MethodPage(
        "parallel-strategies",
        "Several tokens or models at once",
        "Several tokens are committed by one forward, or a draft model computes beside the target.",
        "Strategies",
    ),
    "diffusion": MethodPage(
        "denoising",
        "Diffusion: orders of denoising",
        "For diffusion language models, which fill masked tokens: which ones are filled in a step.",
        "Diffusion",
    ),
    "diffusion/cache": MethodPage(
        "diffusion-caches",
        "Diffusion: caches",
        "Which KV entries of a masked sequence are computed again. They are given as `kv=`.",
        "Diffusion",
    ),
    "kv/evict": MethodPage(
        "kv-eviction",
        "KV cache: eviction",
        "KV entries are dropped for good. They are given as `kv=`.",
        "KV cache",
    ),
    "kv/select": MethodPage(
        "kv-selection",
        "KV cache: selection",
        "All KV entries are held, and some are read: sparse attention. They are given as `kv=`.",
        "KV cache",
    ),
    "kv/store": MethodPage(
        "kv-storage",
        "KV cache: quantization and offloading",
        "KV entries in fewer bits, shared between layers, or in other memory, given as `kv=`.",
        "KV cache",
    ),
    "kv/encoded": MethodPage(
        "encoded-contexts",
        "KV cache: encoded contexts",
        "Contexts that are read apart from the prompt, some as fewer KV entries than tokens. They "
        "are given as `kv=` with `--context`.",
        "KV cache",
    ),
    "guidance": MethodPage(
        "guidance",
        "Guidance",
        "Logits that are made of several prompts, models or layers (`guidance=`).",
        "Logits, rewards, constraints",
    ),
    "processors": MethodPage(
        "logits-processors",
        "Logits processors",
        "Logits are changed by the text before them (`processor=`).",
        "Logits, rewards, constraints",
    ),
    "rewards": MethodPage(
        "rewards",
        "Rewards",
        "What a text is worth, for strategies that choose among several (`reward=`).",
        "Logits, rewards, constraints",
    ),
    "constraints": MethodPage(
        "constraints",
        "Constraints",
        "What may follow what (`constraint=`). JSON schemas, regular expressions and grammars are "
        "options of their own: [Structured output](../structured.md).",
        "Logits, rewards, constraints",
    ),
}


@dataclass(frozen=True)
class Field:
    name: str
    type: str
    default: str
    comment: str


def read_cards() -> list[Card]:
    """Of this package's own methods; those of other packages do not belong into our pages."""
    known = registry.method_files().items()
    own = sorted(key for key, path in known if path.is_relative_to(ROOT))
    return [cards.card(name, kind) for kind, name in own]


# --- what stands in a method's file


def find_class(path: Path, name: str) -> ast.ClassDef:
    module = ast.parse(path.read_text("utf-8"))
    return next(
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name
    )


def method_class(card: Card) -> ast.ClassDef:
    return find_class(card.file, registry.class_name(card.name))


def fields(card: Card) -> list[Field]:
    """The hyper-parameters of a method, with the comment after or above each."""
    text = card.file.read_text("utf-8").splitlines()
    found = []
    for node in method_class(card).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is not None
        ):
            # Offsets of `ast` count bytes.
            rest = text[(node.end_lineno or 1) - 1].encode()[node.end_col_offset or 0 :].decode()
            comment = rest.partition("#")[2].strip() or comment_above(text[: node.lineno - 1])
            annotation, allowed = typed(node.annotation, card.file)
            comment = "; ".join(filter(None, (comment, allowed)))
            found.append(Field(node.target.id, annotation, ast.unparse(node.value), comment))
    return found


def typed(annotation: ast.expr, path: Path) -> tuple[str, str]:
    """A field's type, and in words which of its values are allowed; "": all of them."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated"):
        return ast.unparse(annotation), ""
    assert isinstance(annotation.slice, ast.Tuple)
    kind, *entries = annotation.slice.elts
    words = []
    for entry in entries:
        if isinstance(entry, ast.Call):
            values = [value_of(argument, path) for argument in entry.args]
            options = {str(word.arg): value_of(word.value, path) for word in entry.keywords}
            words.append(str(getattr(settings, ast.unparse(entry.func))(*values, **options)))
    return ast.unparse(kind), "; ".join(words)


def value_of(node: ast.expr, path: Path) -> Any:
    """The value of a literal, of a power of two, or of a constant that a module gives or imports;
    modules are read and not imported, so that nothing loads torch.
    """
    if isinstance(node, ast.BinOp):
        assert isinstance(node.op, ast.LShift)
        return value_of(node.left, path) << value_of(node.right, path)
    if isinstance(node, ast.Tuple):
        parts = [
            value_of(part.value, path) if isinstance(part, ast.Starred) else (value_of(part, path),)
            for part in node.elts
        ]
        return tuple(value for part in parts for value in part)
    if isinstance(node, ast.Dict):  # its keys are the choices
        return tuple(value_of(key, path) for key in node.keys if key is not None)
    if not isinstance(node, ast.Name | ast.Attribute):
        return ast.literal_eval(node)
    name = node.id if isinstance(node, ast.Name) else node.attr
    owner = name if isinstance(node, ast.Name) else ast.unparse(node.value)
    for statement in ast.parse(path.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return value_of(statement.value, path)
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == name:
            assert statement.value is not None
            return value_of(statement.value, path)
        if isinstance(statement, ast.ImportFrom) and any(a.name == owner for a in statement.names):
            module = statement.module if owner == name else f"{statement.module}.{owner}"
            return value_of(
                ast.Name(name), ROOT.joinpath(*str(module).split(".")).with_suffix(".py")
            )
    raise ValueError(f"{path}: {ast.unparse(node)} is no constant")


def comment_above(lines: Sequence[str]) -> str:
    """The comment lines that these lines end with, as one text."""
    found: list[str] = []
    for line in reversed(lines):
        if not line.strip().startswith("#"):
            break
        found.insert(0, line.strip().removeprefix("#").strip())
    return " ".join(found)


def class_attribute(card: Card, name: str) -> Any:
    """What the method's class sets in its body, as in `draws = whole = True`; None: nothing."""
    for node in method_class(card).body:
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if name in names:
                return ast.literal_eval(node.value)
    return None


def draws(card: Card) -> bool:
    """Whether the drafter's nodes carry the distribution that they were drawn from: its file names
    `Law`, or says `draws`.
    """
    tree = ast.parse(card.file.read_text("utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return bool(names & {"Law", "draws"})


# --- commands that try a method

# What the model `dlm-lists` knows, for a shell.
LISTS = (
    "$'Write the list from its end to its beginning.\\n\\n"
    'List: ["Ida", "Otto", "Flora"]\\nAnswer:\''
)
FLAGS = {kind: kind for kind in ("kv", "guidance", "processor", "constraint")}  # of others: method


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


# --- what was measured


@cache
def read_findings() -> dict[str, dict[str, list[dict[str, str]]]]:
    """What experiments found, by kind and name of a method; each with its entry in dev/LOG.md."""
    log = (ROOT / "dev" / "LOG.md").read_text("utf-8")
    entries = set(re.findall(r"^## (.+) \(\w+\)$", log, re.M))
    found: dict[str, Any] = tomllib.loads(FINDINGS.read_text("utf-8"))
    for kind, methods in found.items():
        for name, notes in methods.items():
            if (kind, name) not in registry.method_files():
                raise SystemExit(f"{FINDINGS.name}: there is no {kind} {name}")
            for note in notes:
                if note["log"] not in entries:
                    raise SystemExit(f"{FINDINGS.name}: dev/LOG.md has no entry {note['log']!r}")
    return found


def measured(card: Card, figures: dict[str, Any]) -> list[str]:
    """What was found for the method: in experiments, and beside peers with its defaults."""
    notes = read_findings().get(card.kind, {}).get(card.name, [])
    head, rows = figure_pages.method_rows(figures, card.name)
    if not notes and not rows:
        return [UNMEASURED]
    parts = ["**Measured**"]
    if notes:
        parts.append("\n".join(f"- {note['found']} ({note['log'][:10]})" for note in notes))
    if rows:
        parts += [table(head, rows), figure_pages.circumstances(figures)]
    return parts


# --- pages


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows)])


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def linked(text: str) -> str:
    """arXiv numbers as links."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def method_folder(card: Card) -> str:
    """The folder of the method's file below the package: `drafters/lookup`."""
    return card.file.parent.relative_to(registry.PACKAGE).as_posix()


def page_of(folder: str) -> MethodPage:
    """The page of a folder."""
    name = folder.replace("/", "-")
    return PAGES.get(folder) or MethodPage(name, name.replace("-", " ").title(), "", "More")


def method_link(card: Card, start: str = "") -> str:
    """A link to the method's place, from docs/methods or from a page that `start` leads from."""
    return f"[`{card.name}`]({start}{page_of(method_folder(card)).stem}.md#{card.name})"


def lines_of_card(card: Card, rules: Sequence[Card]) -> str:
    """What the card says by labels, as a list."""
    items = [f"Guarantee: {card.guarantee}"]
    items += [f"Paper: {linked(card.paper)}"] if card.paper not in NOTHING else []
    items.append(f"Cost: {card.cost}")
    for label in ("Needs", "Trains"):
        text = getattr(card, label.lower())
        items += [f"{label}: {text}"] if text not in NOTHING else []
    if card.temperature:
        items.append(f"Temperature: {card.temperature:g} where none is given; 0 is refused")
    if card.kind == "drafter":
        items.append(f"Drafts: {draft_kind(card, rules)}")
    return "\n".join(f"- {item}" for item in items)


def draft_kind(card: Card, rules: Sequence[Card]) -> str:
    """Whether a drafter draws its tokens or chooses them, and who verifies them."""
    how = "drawn" if draws(card) else "chosen"
    own = class_attribute(card, "rule")
    link = [method_link(rule) for rule in rules if rule.name == own]
    return f"{how}, verified by {link[0]} unless `rule=` names another" if link else how


def section(card: Card, rules: Sequence[Card], figures: dict[str, Any]) -> list[str]:
    """All of one method."""
    parts = [f"## {card.name}", card.summary, card.prose, lines_of_card(card, rules)]
    known = [(f"`{f.name}: {f.type} = {f.default}`", f.comment) for f in fields(card)]
    if known:
        parts.append(ast.get_docstring(method_class(card)) or "")
        parts.append(table(["field", "meaning"], [list(pair) for pair in known]))
    if len(card.differs) == 1 and card.differs[0] not in NOTHING:
        parts.append(f"Departures from the paper: {card.differs[0]}")
    elif len(card.differs) > 1:
        parts += ["**Departures from the paper**", "\n".join(f"- {one}" for one in card.differs)]
    parts += measured(card, figures)
    if not is_usual(card):
        parts.append(f"```bash\n{command(card)}\n```")
    return parts


def is_usual(card: Card) -> bool:
    """Whether the method is tried by its name alone, as its page says once."""
    return not card.trial and card.kind != "rule"


def method_page(
    folder: str, chosen: Sequence[Card], every: Sequence[Card], figures: dict[str, Any]
) -> str:
    """The page of one folder."""
    page = page_of(folder)
    rules = [card for card in every if card.kind == "rule"]
    parts = [MADE.format(f"the cards in foretell/{folder}"), f"# {page.title}", page.about]
    how = f"Each is one file of `foretell/{folder}`, named as the method; [Methods](index.md) says "
    how += "how to read an entry."
    if usual := [card for card in chosen if is_usual(card)]:
        how += " One that has no command of its own is tried by its name:"
        how += f"\n\n```bash\n{command(usual[0])}\n```"
    parts.append(how)
    if chosen[0].kind == "drafter":
        text = "Which rules verify these drafts says [one table](verification-rules.md#{})."
        parts.append(text.format(RULES.lower().replace(" ", "-")))
    for card in chosen:
        parts += section(card, rules, figures)
    if chosen[0].kind == "rule":
        parts += rule_table(chosen, [card for card in every if card.kind == "drafter"])
    return "\n\n".join(part for part in parts if part) + "\n"


RULES = "Which rule verifies whose drafts"


def rule_table(rules: Sequence[Card], drafters: Sequence[Card]) -> list[str]:
    """Which rules verify chosen drafts, and which drawn ones; and whose drafts are what."""
    drawn = [method_link(card) for card in drafters if draws(card)]
    chosen = [method_link(card) for card in drafters if not draws(card)]
    text = "A drawn token carries the distribution that it was drawn from; a chosen one has none. "
    text += "At temperature 0 every exact rule is the walk; above it, `rule=` takes:"
    head = ["rule", "chosen drafts", "drawn drafts", "guarantee"]
    rows = [
        [f"[`{rule.name}`](#{rule.name})", suits(rule, False), suits(rule, True), rule.guarantee]
        for rule in rules
    ]
    return [
        f"## {RULES}",
        text,
        table(head, rows),
        f"Drawn are the drafts of {', '.join(drawn)}.",
        f"Chosen are those of {', '.join(chosen)}.",
    ]


def suits(rule: Card, drawn: bool) -> str:
    """In words, whether a rule verifies the trees of a drafter that draws its tokens, or chooses
    them.
    """
    if rule.needs.startswith("any"):
        return "yes"
    if "not drawn" in rule.needs:
        return "only at temperature 0" if drawn else "yes"
    return f"where a tree is: {rule.needs}" if drawn else "only at temperature 0"


def by_folder(every: Sequence[Card]) -> dict[str, list[Card]]:
    """The cards of each folder, in the order of PAGES."""
    found: dict[str, list[Card]] = {}
    order = list(PAGES)
    known = {method_folder(card) for card in every}
    for folder in sorted(known, key=lambda f: (order.index(f) if f in order else len(order), f)):
        found[folder] = [card for card in every if method_folder(card) == folder]
    return found


READING = """One file a method; the pages are made from these files. An entry has the method's
summary, how it works, its guarantee, paper and cost, what it needs and trains (unless that is
nothing), its fields with their defaults, every departure from the paper, and what was measured.

*Exact* methods keep the text's distribution, and at temperature 0 its tokens; *greedy* ones hold at
temperature 0; what *bounded* and *lossy* ones change, their entries say. `foretell audit --method
NAME` checks the claims of drafters and strategies on your model and machine. Figures are of
SmolLM2-135M-Instruct on two cores of a CPU unless they say otherwise, and their dates are those of
entries in `dev/LOG.md`."""


def index_page(every: Sequence[Card]) -> str:
    """One line a method."""
    parts = [MADE.format("the methods' cards"), "# Methods", READING]
    for folder, chosen in by_folder(every).items():
        page = page_of(folder)
        rows = [[method_link(c), c.summary, c.guarantee.split(":")[0]] for c in chosen]
        parts.append(f"## {page.title}")
        parts.append(table(["name", "what it does", "guarantee"], rows))
    return "\n\n".join(parts) + "\n"


def navigation(every: Sequence[Card]) -> str:
    """The methods' part of the site's navigation."""
    groups: dict[str, list[str]] = {}
    for folder in by_folder(every):
        page = page_of(folder)
        groups.setdefault(page.group, []).append(f"methods/{page.stem}.md")
    lines = ["  - Methods:", "      - methods/index.md"]
    for title, pages in groups.items():
        shown = f"[{', '.join(pages)}]" if len(pages) > 1 else pages[0]
        lines.append(f"      - {title}: {shown}")
    return "\n".join(lines)


def method_pages(every: Sequence[Card], figures: dict[str, Any]) -> dict[Path, str]:
    """Every file of docs/methods with its text; `figures` is what scripts/compare.py found."""
    folder = ROOT / "docs" / "methods"
    pages = {folder / "index.md": index_page(every)}
    for name, chosen in by_folder(every).items():
        pages[folder / f"{page_of(name).stem}.md"] = method_page(name, chosen, every, figures)
    return pages
