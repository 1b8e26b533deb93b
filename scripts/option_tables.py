"""From the command line to the tables of docs/cli.md: options that several commands share stand in
one section, each command's own in its table. Nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from method_pages import table  # noqa: E402

from foretell.cli import app  # noqa: E402

GROUPS = ("Models and output", "Generation", "Training", "Measuring and serving")
FEW = 3  # names that may be left out of "all of"


@dataclass(frozen=True)
class Option:
    """An option, or an argument, of one command."""

    names: str
    default: str
    meaning: str
    named: bool  # whether it begins with a dash

    @property
    def key(self) -> tuple[str, str]:
        """What is the same wherever an option is shared; its default may differ."""
        return self.names, self.meaning


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


def read_options(command: Any) -> list[Option]:
    """The options of a command, in its order."""
    found = []
    for p in command.params:
        plain = p.default in (None, "") or isinstance(p.default, bool)
        default = "" if plain and not p.required else "required" if p.required else f"`{p.default}`"
        if isinstance(p.default, bool):
            default = "on" if p.default else "off"
        takes = f" {p.metavar}" if p.metavar else ""  # a unit, say, or a form
        names = " ".join(f"`{o}{takes}`" for o in (*p.opts, *p.secondary_opts))
        named = any(o.startswith("-") for o in p.opts)
        if not named:
            names = f"`{p.metavar or p.name.upper()}`"
        found.append(Option(names, default, p.help or "", named))
    return found


class OptionTables:
    """The tables of all commands."""

    def __init__(self, known: dict[str, Any] | None = None) -> None:
        self.options = {name: read_options(one) for name, one in (known or commands()).items()}
        self.users: dict[tuple[str, str], list[str]] = {}
        for name, options in self.options.items():
            for option in options:
                if option.named:
                    self.users.setdefault(option.key, []).append(name)
        self.shared = {key: users for key, users in self.users.items() if len(users) > 1}

    def group(self, key: tuple[str, str]) -> str:
        """Where a shared option stands."""
        users = self.shared[key]
        training = [name for name in users if name.startswith("train ")]
        if training:
            return GROUPS[2] if len(training) == len(users) else GROUPS[0]
        if "generate" not in users:
            return GROUPS[3]
        return GROUPS[0] if {"bench", "generate", "serve"} <= set(users) else GROUPS[1]

    def default(self, key: tuple[str, str]) -> str:
        """The commonest default of a shared option."""
        every = (
            one.default for options in self.options.values() for one in options if one.key == key
        )
        return Counter(every).most_common(1)[0][0]

    def shared_tables(self) -> str:
        """The section of shared options."""
        parts = []
        for group in GROUPS:
            keys = [key for key in self.shared if self.group(key) == group]
            told = group in GROUPS[2:]  # who shares them
            rows = []
            for key in keys:
                users = ", ".join(name.removeprefix("train ") for name in self.shared[key])
                rows.append([key[0], self.default(key), key[1], *([users] if told else [])])
            head = ["option", "default", "meaning", *(["commands"] if told else [])]
            parts += [f"### {group}", table(head, rows)] if keys else []
        return "\n\n".join(parts)

    def own_table(self, name: str) -> str:
        """A command's own options, and the names of those that it shares."""
        own = [one for one in self.options[name] if one.key not in self.shared or not one.named]
        rows = [[one.names, one.default, one.meaning] for one in own]
        parts = [table(["option", "default", "meaning"], rows)] if rows else []
        lists = [self.shared_names(name, group) for group in GROUPS]
        if any(lists):
            parts.append(f"Shared options: {'; '.join(one for one in lists if one)}.")
        return "\n\n".join(parts)

    def shared_names(self, name: str, group: str) -> str:
        """The options of a group that a command has, and those of its defaults that are others."""
        options = [one for one in self.options[name] if one.key in self.shared]
        mine = {one.key: one for one in options if self.group(one.key) == group}
        if not mine:
            return ""
        link = f"[{group.lower()}](#{group.lower().replace(' ', '-')})"
        every = [key for key in self.shared if self.group(key) == group]
        missing = [key for key in every if key not in mine]
        other = {key: one for key, one in mine.items() if one.default != self.default(key)}
        if len(missing) > FEW or len(missing) >= len(mine):
            words = [self.with_default(one, one.key in other) for one in mine.values()]
            return f"of {link} {', '.join(words)}"
        text = f"all of {link}"
        if missing:
            text += f" but {', '.join(bare(key[0]) for key in missing)}"
        if other:
            text += f", with {', '.join(self.with_default(one, True) for one in other.values())}"
        return text

    def with_default(self, option: Option, told: bool) -> str:
        return f"{bare(option.names)} ({option.default or 'none'})" if told else bare(option.names)


def bare(names: str) -> str:
    """The first name of an option, without what it takes."""
    return f"`{names.split('`')[1].split()[0]}`"
