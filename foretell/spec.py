"""Spec strings: `ngram:n=3,k=10`.

The fields are those of the method's dataclass; a drafter also takes `rule` (a verification rule,
whose own fields may follow) and `nodes` (how many to draft): `token-recycling:nodes=16,rule=coin`,
`draft:rule=typical,epsilon=0.05`. Without `rule`, a drafter that names one has that. Drafters
joined by `+` share one tree, and `rule` and `nodes` come after the last:
`ngram:k=8+token-recycling:nodes=16`. Cache policies that are joined act on one cache:
`snapkv:budget=1024+gear:bits=4`. A field that holds numbers takes them with spaces between:
`rsd-c:branches=3 2 1`. Where they are a text's tokens (foretell.core.text.TokenIds), it may be a
text file instead: `input-guided:source=@essay.txt`. One that holds a drafter takes a spec, in
parentheses if it has a comma or a + in it: `cascade:inner=(ngram:n=2,k=8)`, and one that holds a
cache policy likewise: `view:kv=quest:budget=512`. Any other value may have them too:
`extract:passage=(Paris, not Rome)`. Booleans are 1, true, yes, on or 0, false, no, off.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from foretell.core.text import TokenIds, Written
from foretell.errors import BadConfig, UnknownMethod
from foretell.registry import kind_of, load, names

if TYPE_CHECKING:
    from foretell.core.constraint import TextConstraint
    from foretell.core.drafter import Drafter
    from foretell.core.processor import Warper
    from foretell.core.source import Source
    from foretell.kv.base import KV
    from foretell.rewards.base import Reward
    from foretell.speculation.strategy import Strategy

# What `auto` stands for: drafters of copies, of near copies, and of what follows each token.
AUTO = "suffix+approx+token-recycling"
STATIC = "confidence"  # and where the model fills masks, one token a forward
QUICK = "suffix"  # and where a plain step takes less than STEP: others would cost too much of it
STEP = 8e-3  # seconds
# Beside either, where the draft model's weights are at most this share of the target's, so that a
# chain takes less than half a step. It is paused where it wins less than it takes.
DRAFT = "draft:best=yes"
CHEAP = 1 / 8
# Beside QUICK alone, where a head ships for the target and a plain step takes at least HEAD_STEP:
# what a quicker step wins by it, growing a tree takes.
HEAD = "eagle3:depth=5,breadth=4,least=0.1,reads=256"
HEAD_STEP = 2.5e-3  # seconds
YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")
SPEC = re.compile(r"[a-z][\w-]*:\w+=")  # what is meant as a method, known or not
Encode = Callable[[str], list[int]]
T = TypeVar("T")


def build(
    name: str, kind: str, options: Mapping[str, str | Reward], encode: Encode | None = None
) -> Any:
    """The dataclass with these fields. Raises BadConfig for a field it lacks, or for a value that
    is not of the field's type.
    """
    cls = load(name, kind)
    types = get_type_hints(cls, include_extras=True)
    fields = [field.name for field in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in fields:
            known = [*fields, "rule", "nodes"] if kind == "drafter" else fields
            raise UnknownMethod.near(f"field of {name}", key, known)
        values[key] = _value(f"{name}:{key}", types[key], text, encode)
    return cls(**values)


def _value(field: str, kind: Any, text: str | Reward, encode: Encode | None) -> Any:
    """A field's value from its text. Raises BadConfig."""
    # Imported here, since checking a name must not import torch; who has fields has imported it.
    from foretell.core.drafter import Drafter
    from foretell.kv.base import KV
    from foretell.rewards.base import Reward

    if isinstance(text, Reward):
        return text
    text = unwrapped(text)
    if kind == TokenIds:
        return tokens(field, text, encode)
    if kind == tuple[int, ...]:
        return whole_numbers(field, text, "whole numbers with spaces between, as in 3 2 1")
    if kind == tuple[float, ...]:
        return numbers(field, text, float, "numbers with spaces between, as in 0.5 0.7")
    if Drafter in get_args(kind):
        return _inner(field, text, encode)
    if Reward in get_args(kind):
        return reward_of(text, encode)
    if KV in get_args(kind):
        return kv_of(text)
    if kind == Written:
        return content(field, text) if text.startswith("@") else text
    if kind is bool:
        if text.lower() not in YES + NO:
            raise BadConfig.field(field, text, f"one of {', '.join(YES + NO)}")
        return text.lower() in YES
    try:
        return kind(text)
    except ValueError:
        raise BadConfig.field(field, text, f"a value of type {kind.__name__}") from None


def whole_numbers(field: str, text: str, allowed: str) -> tuple[int, ...]:
    """Those of `1 2 3` or `()`. Raises BadConfig, which says what is `allowed`."""
    return numbers(field, text, int, allowed)


def numbers(field: str, text: str, kind: Callable[[str], T], allowed: str) -> tuple[T, ...]:
    """The same of another kind of numbers."""
    try:
        return tuple(kind(part) for part in text.strip("()").split())
    except ValueError:
        raise BadConfig.field(field, text, allowed) from None


def _inner(field: str, text: str, encode: Encode | None) -> Drafter:
    """The drafter that a field names. Raises BadConfig."""
    from foretell.speculation.strategy import Speculative

    _, strategy = resolve(unwrapped(text), encode)
    if not isinstance(strategy, Speculative):
        raise BadConfig.field(field, text, "a drafter, such as ngram or (ngram:n=2,k=8)")
    if strategy != Speculative(strategy.drafter):
        raise BadConfig(f"{field}={text}: rule and nodes are for the whole method; leave them out")
    return strategy.drafter


def tokens(field: str, text: str, encode: Encode | None) -> tuple[int, ...]:
    """The ids of `1 2 3`, `()` or `@FILE`, whose text is taken as it is, line ends included. Raises
    BadConfig.
    """
    if not text.startswith("@"):
        allowed = "token ids with spaces between, or @ and the name of a text file"
        return whole_numbers(field, text, allowed)
    if encode is None:
        raise BadConfig(
            f"{field}={text}: there is no tokenizer here to read a text with; "
            "give token ids, as in 1 2 3"
        )
    return tuple(encode(content(field, text)))


def content(field: str, text: str) -> str:
    """What stands in the file that `@FILE` names. Raises BadConfig."""
    try:
        found = Path(text[1:]).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadConfig(
            f"{field}={text}: cannot be read ({what}); give a UTF-8 text file"
        ) from error
    if not found:
        raise BadConfig(f"{field}={text}: the file is empty; give one with a text")
    return found


def split(text: str, mark: str) -> list[str]:
    """The parts of a text between marks, of which those in a value in parentheses divide nothing.

    Raises BadConfig where a parenthesis is not closed.
    """
    parts = []
    start = depth = 0
    for place, letter in enumerate(text):
        if letter == "(" and (depth or text[place - 1 : place] == "="):
            depth += 1
        elif letter == ")" and depth:
            depth -= 1
        elif letter == mark and not depth:
            parts.append(text[start:place])
            start = place + 1
    if depth:
        raise BadConfig(f"{text!r}: a parenthesis is not closed; write one more ')'")
    return [*parts, text[start:]]


def unwrapped(value: str) -> str:
    """A field's value without parentheses around it, if these belong together."""
    depth = 0
    for place, letter in enumerate(value):
        depth += (letter == "(") - (letter == ")")
        if depth <= 0:
            return value[1:-1] if place and place == len(value) - 1 else value
    return value


def given(spec: str, kind: str = "drafter") -> Iterator[tuple[str, str, str]]:
    """(method, field, value) of all that a spec says, the specs within it included."""
    for piece in pieces(spec, kind):
        name, _, fields = piece.partition(":")
        for field in filter(None, split(fields, ",")):
            key, _, value = field.partition("=")
            yield name, key.strip(), value.strip()
            if ":" in value:
                yield from given(unwrapped(value.strip()))


def pieces(spec: str, kind: str = "drafter") -> list[str]:
    """The parts of `a+b:x=1`, methods of one kind. A + in the path of a file (`source=@a+b.txt`,
    `path=./a+b`) joins nothing, nor one in a reward's own text (`words=C++`).
    """
    parts: list[str] = []
    for piece in split(spec, "+"):
        last_value = parts[-1].rpartition(",")[2].partition("=")[2] if parts else ""
        in_value = last_value.startswith("@") or "/" in last_value
        in_value |= kind == "reward" and bool(parts) and not SPEC.match(piece)
        if in_value and piece.partition(":")[0] not in names(kind):
            parts[-1] += f"+{piece}"
        else:
            parts.append(piece)
    return parts


def resolve(spec: str | Drafter | Strategy, encode: Encode | None = None) -> tuple[str, Strategy]:
    """(name, strategy) of a spec string or a config object. Raises UnknownMethod or BadConfig.

    `encode`: the tokenizer's text -> ids without special tokens, for fields that name a text file.
    """
    if not isinstance(spec, str):
        return _of_config(spec)
    parts: list[tuple[str, str, dict[str, str]]] = []
    for piece in pieces(AUTO if spec == "auto" else spec):
        name, _, fields = piece.partition(":")
        parts.append((name, kind_of(name), _options(spec, fields)))
    name, kind, options = parts[-1]
    if len(parts) == 1 and kind != "drafter":
        return name, build(name, kind, options, encode)
    for other, kind, given in parts:
        if kind != "drafter":
            raise BadConfig(f"{spec!r}: {other} is a {kind}; only drafters can be joined by '+'")
        common = sorted({"rule", "nodes"} & given.keys())
        if common and given is not options:
            raise BadConfig(
                f"{spec!r}: {common[0]} is for all drafters together; write it after the last, "
                f"{name}"
            )
    return _speculative(parts, encode)


def reward_of(spec: str | Reward, encode: Encode | None = None) -> Reward:
    """The reward that a spec string or a config object means, of several joined by `+` their mean,
    each with its `weight`. Raises UnknownMethod or BadConfig.
    """
    from foretell.rewards.base import Mean, Reward

    if isinstance(spec, Reward):
        return spec
    if not isinstance(spec, str) or not spec:
        raise BadConfig.field(
            "reward", spec, "a spec like 'keywords:words=dog', or a config object"
        )
    made: list[Reward] = []
    weights: list[float] = []
    parts = pieces(spec, "reward")
    for piece in parts:
        name, _, fields = piece.partition(":")
        options = _options(spec, fields)
        if len(parts) > 1:
            weights.append(_value(f"{name}:weight", float, options.pop("weight", "1"), None))
        made.append(build(name, "reward", options, encode))
    return made[0] if len(made) == 1 else Mean(tuple(made), tuple(weights))


def with_reward(
    spec: str | Drafter | Strategy, reward: str | Reward, encode: Encode | None = None
) -> tuple[str, Strategy]:
    """As `resolve`, of a method that chooses by this reward. Raises BadConfig for another one."""
    made = reward_of(reward, encode)
    name = spec.partition(":")[0] if isinstance(spec, str) else _of_config(spec)[0]
    if not isinstance(spec, str):
        fields = [field.name for field in dataclasses.fields(spec)]  # type: ignore[arg-type]
    elif name in names("strategy"):
        fields = [field.name for field in dataclasses.fields(load(name, "strategy"))]
    else:
        fields = []
    if "reward" not in fields:
        raise BadConfig(
            f"reward={reward!r}: {name} chooses among no texts; leave it out, or take a method "
            "that does, such as best-of"
        )
    if not isinstance(spec, str):
        return _of_config(dataclasses.replace(spec, reward=made))  # type: ignore[type-var]
    options = _options(spec, spec.partition(":")[2])
    if "reward" in options:
        raise BadConfig(f"{spec!r} has a reward of its own, and another is given: leave one out")
    return name, build(name, "strategy", {**options, "reward": made}, encode)


def source_of(spec: str | Source, encode: Encode | None = None) -> Source:
    """The source of rows that a spec string or a config object means. Raises UnknownMethod or
    BadConfig.
    """
    from foretell.core.source import Source

    if isinstance(spec, Source):
        return spec
    if not isinstance(spec, str) or not spec:
        raise BadConfig.field("rows", spec, "a spec like 'cfg:g=1.5', or a config object")
    name, _, fields = spec.partition(":")
    return build(name, "rows", _options(spec, fields), encode)  # type: ignore[no-any-return]


def kv_of(spec: str | KV) -> KV:
    """The cache policy that a spec string or a config object means, several joined by `+`. Raises
    UnknownMethod or BadConfig.
    """
    from foretell.kv.base import KV
    from foretell.kv.store.composition import Composition

    if isinstance(spec, KV):
        return spec
    if not isinstance(spec, str) or not spec:
        raise BadConfig.field("kv", spec, "a spec like 'snapkv:budget=1024', or a config object")
    parts: list[KV] = []
    for piece in pieces(spec, "kv"):
        name, _, fields = piece.partition(":")
        parts.append(build(name, "kv", _options(spec, fields)))
    return parts[0] if len(parts) == 1 else Composition(tuple(parts))


def warpers_of(
    spec: str | Warper | Sequence[Warper], encode: Encode | None = None
) -> tuple[Warper, ...]:
    """The same for warpers, of which a spec string may join several by `+`."""
    from foretell.core.processor import Warper

    if isinstance(spec, Warper):
        return (spec,)
    if isinstance(spec, list | tuple) and all(isinstance(one, Warper) for one in spec):
        return tuple(spec)
    if not isinstance(spec, str) or not spec:
        allowed = "a spec like 'momentum' or 'momentum+rpg', or config objects"
        raise BadConfig.field("warp", spec, allowed)
    found = []
    for piece in split(spec, "+"):
        name, _, fields = piece.partition(":")
        found.append(build(name, "warp", _options(spec, fields), encode))
    return tuple(found)


def constraint_of(spec: str, encode: Encode | None = None) -> TextConstraint:
    """The constraint that a spec string means. Raises UnknownMethod or BadConfig."""
    if not spec:
        raise BadConfig.field("constraint", spec, "a spec like 'monitor:root=FOLDER', or an object")
    name, _, fields = spec.partition(":")
    made: TextConstraint = build(name, "constraint", _options(spec, fields), encode)
    return made


def _of_config(config: Drafter | Strategy) -> tuple[str, Strategy]:
    """The same for a config object."""
    # Imported here, since checking a name must not import torch.
    from foretell.core.drafter import Drafter
    from foretell.speculation.composition import Composition
    from foretell.speculation.strategy import Speculative

    drafter = config.drafter if isinstance(config, Speculative) else config
    parts = drafter.parts if isinstance(drafter, Composition) else (drafter,)
    names = [type(part).__module__.rpartition(".")[2].replace("_", "-") for part in parts]
    return "+".join(names), Speculative(config) if isinstance(config, Drafter) else config


def _options(spec: str, fields: str) -> dict[str, str]:
    """`n=3,k=10` as a dict."""
    options = {}
    for part in filter(None, split(fields, ",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise BadConfig(f"{spec!r}: write fields as name=value, as in ngram:n=3,k=10")
        options[key.strip()] = value.strip()
    return options


def _speculative(
    parts: list[tuple[str, str, dict[str, str]]], encode: Encode | None
) -> tuple[str, Strategy]:
    """The strategy of one drafter or of several joined ones; the last has `rule` and `nodes`."""
    from foretell.speculation.composition import Composition
    from foretell.speculation.strategy import Speculative

    last, kind, options = parts[-1]
    rule_name = options.pop("rule", "default")
    nodes = options.pop("nodes", "0")
    if not nodes.isdigit():
        raise BadConfig.field(f"{last}:nodes", nodes, "a whole number from 0")
    of_rule: dict[str, str] = {}
    if rule_name != "default":
        fields = {field.name for field in dataclasses.fields(load(last, kind))}
        of_rule = {key: options.pop(key) for key in list(options) if key not in fields}
    drafters = [build(name, "drafter", given, encode) for name, _, given in parts]
    drafter = drafters[0] if len(drafters) == 1 else Composition(tuple(drafters))
    rule = None if rule_name == "default" else build(rule_name, "rule", of_rule)
    name = "+".join(name for name, _, _ in parts)
    return name, Speculative(drafter, rule, int(nodes))
