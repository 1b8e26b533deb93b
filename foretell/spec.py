"""Spec strings: `ngram:n=3,k=10`.

The fields are those of the method's dataclass; a drafter also takes `rule` (a verification rule,
whose own fields may follow) and `nodes` (how many to draft): `token-recycling:nodes=16,rule=coin`,
`draft:rule=typical,epsilon=0.05`. Drafters joined by `+` share one tree; `rule` and `nodes` stand
behind the last: `ngram:k=8+token-recycling:nodes=16`. A field that holds tokens takes their ids
with spaces between, or a text file: `input-guided:source=@essay.txt`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from foretell.errors import BadConfig, UnknownMethod
from foretell.registry import kind_of, load, names

if TYPE_CHECKING:
    from foretell.core.drafter import Drafter
    from foretell.core.strategy import Strategy

# what `auto` stands for: copies, near copies, and what follows each token
AUTO = "suffix+approx+token-recycling"
QUICK, STEP = (
    "suffix",
    8e-3,
)  # and where a plain step takes fewer seconds: asking others would cost too much of it
Encode = Callable[[str], list[int]]


def build(name: str, kind: str, options: dict[str, str], encode: Encode | None = None) -> Any:
    """The dataclass with these fields. Raises BadConfig for a field it lacks or a value that is
    none of its type.
    """
    cls = load(name, kind)
    hints = get_type_hints(cls)
    known = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in known:
            raise UnknownMethod.near(
                f"field of {name}", key, [*known, "rule", "nodes"] if kind == "drafter" else known
            )
        if known[key] == tuple[int, ...]:
            values[key] = tokens(f"{name}:{key}", text, encode)
            continue
        try:
            values[key] = (
                text.lower() in ("1", "true", "yes") if known[key] is bool else known[key](text)
            )
        except ValueError:
            raise BadConfig.field(
                f"{name}:{key}", text, f"a value of type {known[key].__name__}"
            ) from None
    return cls(**values)


def tokens(field: str, text: str, encode: Encode | None) -> tuple[int, ...]:
    """The ids of `1 2 3`, `()` or `@FILE`, whose text is taken as it is, ends of lines too. Raises
    BadConfig.
    """
    if not text.startswith("@"):
        try:
            return tuple(int(part) for part in text.strip("()").split())
        except ValueError:
            raise BadConfig.field(
                field, text, "token ids with spaces between, or @ and the name of a text file"
            ) from None
    if encode is None:
        raise BadConfig(
            f"{field}={text}: there is no tokenizer here to read a text with; give token ids, as in 1 2 3"
        )
    try:
        content = Path(text[1:]).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadConfig(
            f"{field}={text}: cannot be read ({what}); give a UTF-8 text file"
        ) from error
    if not content:
        raise BadConfig(f"{field}={text}: the file is empty; give one with a text")
    return tuple(encode(content))


def pieces(spec: str) -> list[str]:
    """The parts of `a+b:x=1`; a + in the path of a file (`source=@a+b.txt`, `path=./a+b`) joins
    nothing.
    """
    found: list[str] = []
    for piece in spec.split("+"):
        value = found[-1].rpartition(",")[2].partition("=")[2] if found else ""
        if (value.startswith("@") or "/" in value) and piece.partition(":")[0] not in names(
            "drafter"
        ):
            found[-1] += f"+{piece}"
        else:
            found.append(piece)
    return found


def resolve(spec: str | Drafter | Strategy, encode: Encode | None = None) -> tuple[str, Strategy]:
    """(name, strategy) of a spec string or a config object. Raises UnknownMethod or BadConfig.

    `encode`: the tokenizer's text -> ids without special tokens, for fields that name a text file.
    """
    from foretell.core.drafter import Drafter
    from foretell.core.strategy import Speculative
    from foretell.policy.compose import (
        Composition,
    )  # not above: checking a name must not import torch

    if not isinstance(spec, str):
        inner = spec.drafter if isinstance(spec, Speculative) else spec
        joined = inner.parts if isinstance(inner, Composition) else (inner,)
        name = "+".join(
            type(part).__module__.rpartition(".")[2].replace("_", "-") for part in joined
        )
        return name, Speculative(spec) if isinstance(spec, Drafter) else spec
    parts: list[tuple[str, str, dict[str, str]]] = []
    for piece in pieces(AUTO if spec == "auto" else spec):
        name, _, rest = piece.partition(":")
        options: dict[str, str] = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if not equals:
                raise BadConfig(f"{spec!r}: write fields as name=value, as in ngram:n=3,k=10")
            options[key.strip()] = value.strip()
        parts.append((name, kind_of(name), options))
    name, kind, options = parts[-1]
    if len(parts) == 1 and kind != "drafter":
        return name, build(name, kind, options, encode)
    for other, kind, _ in parts:
        if kind != "drafter":
            raise BadConfig(f"{spec!r}: {other} is a {kind}; only drafters can be joined by '+'")
    rule, nodes = options.pop("rule", "default"), options.pop("nodes", "0")
    if not nodes.isdigit():
        raise BadConfig.field(f"{name}:nodes", nodes, "a whole number")
    own = {f.name for f in dataclasses.fields(load(name, kind))}
    extra = {key: options.pop(key) for key in list(options) if rule != "default" and key not in own}
    chosen = None if rule == "default" else build(rule, "rule", extra)
    for _, _, given in parts[:-1]:
        if wrong := sorted({"rule", "nodes"} & given.keys()):
            raise BadConfig(
                f"{spec!r}: {wrong[0]} is for all drafters together; write it behind the last, {name}"
            )
    drafters = [build(other, "drafter", given, encode) for other, _, given in parts]
    drafter = drafters[0] if len(drafters) == 1 else Composition(tuple(drafters))
    return "+".join(other for other, _, _ in parts), Speculative(drafter, chosen, int(nodes))
