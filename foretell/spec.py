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
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from foretell.core.settings import allowed_values, bare_type, check_value
from foretell.core.text import TokenIds, Written
from foretell.errors import BadConfig, UnknownMethod
from foretell.registry import kind_of, load_method, method_files, method_names

if TYPE_CHECKING:
    from foretell.core.constraint import TextConstraint
    from foretell.core.drafter import Drafter
    from foretell.core.processor import Processor
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


def build_method(
    name: str, kind: str, options: Mapping[str, str | Reward], encode: Encode | None = None
) -> Any:
    """Builds the dataclass of a method with these fields. Raises BadConfig for a field it lacks, or
    for a value that is not of the field's type.
    """
    method_class: Any = load_method(name, kind)
    field_types = _field_types(method_class)
    field_names = [field.name for field in dataclasses.fields(method_class)]
    values: dict[str, Any] = {}
    for field_name, value in options.items():
        if field_name not in field_names:
            known_fields = [*field_names, "rule", "nodes"] if kind == "drafter" else field_names
            raise UnknownMethod.suggest_names(f"field of {name}", field_name, known_fields)
        values[field_name] = _parse_value(
            f"{name}:{field_name}", bare_type(field_types[field_name]), value, encode
        )
    return method_class(**values)


@cache
def _field_types(method_class: type) -> dict[str, Any]:
    return get_type_hints(method_class, include_extras=True)


def _parse_value(field: str, field_type: Any, text: str | Reward, encode: Encode | None) -> Any:
    """A field's value from its text. Raises BadConfig."""
    # Imported here, since checking a name must not import torch; who has fields has imported it.
    from foretell.core.drafter import Drafter
    from foretell.kv.base import KV
    from foretell.rewards.base import Reward

    if isinstance(text, Reward):
        return text
    text = strip_parentheses(text)
    if field_type == TokenIds:
        return parse_tokens(field, text, encode)
    if field_type == tuple[int, ...]:
        return parse_integers(field, text, "whole numbers with spaces between, as in 3 2 1")
    if field_type == tuple[float, ...]:
        return parse_numbers(field, text, float, "numbers with spaces between, as in 0.5 0.7")
    if Drafter in get_args(field_type):
        return _inner_drafter(field, text, encode)
    if Reward in get_args(field_type):
        return build_reward(text, encode)
    if KV in get_args(field_type):
        return build_cache_policy(text)
    if field_type == Written:
        return read_content(field, text) if text.startswith("@") else text
    if field_type is bool:
        if text.lower() not in YES + NO:
            raise BadConfig.field(field, text, f"one of {', '.join(YES + NO)}")
        return text.lower() in YES
    try:
        return field_type(text)
    except ValueError:
        raise BadConfig.field(field, text, f"a value of type {field_type.__name__}") from None


def parse_integers(field: str, text: str, expected: str) -> tuple[int, ...]:
    """Reads the whole numbers of `1 2 3` or `()`. Raises BadConfig, which says what is
    `expected`.
    """
    return parse_numbers(field, text, int, expected)


def parse_numbers(
    field: str, text: str, convert: Callable[[str], T], expected: str
) -> tuple[T, ...]:
    """Reads numbers with spaces between, each by `convert`. Raises BadConfig, which says what is
    `expected`.
    """
    try:
        return tuple(convert(part) for part in text.strip("()").split())
    except ValueError:
        raise BadConfig.field(field, text, expected) from None


def _inner_drafter(field_name: str, drafter_spec: str, encode: Encode | None) -> Drafter:
    """The drafter that a field names. Raises BadConfig."""
    from foretell.speculation.strategy import Speculative

    _, strategy = resolve_method(strip_parentheses(drafter_spec), encode)
    if not isinstance(strategy, Speculative):
        raise BadConfig.field(
            field_name, drafter_spec, "a drafter, such as ngram or (ngram:n=2,k=8)"
        )
    if strategy != Speculative(strategy.drafter):
        raise BadConfig(
            f"{field_name}={drafter_spec}: rule and nodes are for the whole method; leave them out"
        )
    return strategy.drafter


def parse_tokens(field: str, text: str, encode: Encode | None) -> tuple[int, ...]:
    """Reads the ids of `1 2 3`, `()` or `@FILE`, whose text is taken as it is, line ends included.
    Raises BadConfig.
    """
    if not text.startswith("@"):
        expected = "token ids with spaces between, or @ and the name of a text file"
        return parse_integers(field, text, expected)
    if encode is None:
        raise BadConfig(
            f"{field}={text}: there is no tokenizer here to read a text with; "
            "give token ids, as in 1 2 3"
        )
    return tuple(encode(read_content(field, text)))


def read_content(field: str, text: str) -> str:
    """Reads the text of the file that `@FILE` names. Raises BadConfig."""
    try:
        file_text = Path(text[1:]).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadConfig(
            f"{field}={text}: cannot be read ({reason}); give a UTF-8 text file"
        ) from error
    if not file_text:
        raise BadConfig(f"{field}={text}: the file is empty; give one with a text")
    return file_text


def split_outside(text: str, separator: str) -> list[str]:
    """Splits a text at a separator, which divides nothing within a value in parentheses.

    Raises BadConfig where a parenthesis is not closed.
    """
    parts = []
    part_start = depth = 0
    for position, letter in enumerate(text):
        if letter == "(" and (depth or text[position - 1 : position] == "="):
            depth += 1
        elif letter == ")" and depth:
            depth -= 1
        elif letter == separator and not depth:
            parts.append(text[part_start:position])
            part_start = position + 1
    if depth:
        raise BadConfig(f"{text!r}: a parenthesis is not closed; write one more ')'")
    return [*parts, text[part_start:]]


def strip_parentheses(value: str) -> str:
    """A field's value without parentheses around it, if these belong together."""
    depth = 0
    for position, letter in enumerate(value):
        depth += (letter == "(") - (letter == ")")
        if depth <= 0:
            return value[1:-1] if position and position == len(value) - 1 else value
    return value


def check_fields(spec: str, kind: str = "drafter") -> None:
    """Raises UnknownMethod for a field that there is not, and BadConfig for a number that a field
    may not have, without making the method: what needs a model or a tokenizer is not checked.
    """
    kinds = {name: found_kind for found_kind, name in method_files()}
    for name, field_name, text in iterate_fields(spec, kind):
        if name not in kinds:  # a text with a colon in it
            continue
        settings: Any = load_method(name, kinds[name])
        hints = get_type_hints(settings, include_extras=True)
        names = [field.name for field in dataclasses.fields(settings)]
        # Of drafters it may be the rule's, of rewards the weight.
        if field_name not in names and kinds[name] in ("kv", "guidance", "processor"):
            raise UnknownMethod.suggest_names(f"field of {name}", field_name, names)
        field_type = bare_type(hints.get(field_name))
        if field_name not in names or field_type not in (int, float, bool):
            continue
        field = f"{name}:{field_name}"
        value = _parse_value(field, field_type, text, None)
        if field_name in allowed_values(settings):
            check_value(field, value, allowed_values(settings)[field_name])


def iterate_fields(spec: str, kind: str = "drafter") -> Iterator[tuple[str, str, str]]:
    """Yields (method, field, value) of all that a spec says, the specs within it included."""
    for piece in split_methods(spec, kind):
        name, _, field_specs = piece.partition(":")
        for field_spec in filter(None, split_outside(field_specs, ",")):
            field_name, _, value = field_spec.partition("=")
            yield name, field_name.strip(), value.strip()
            if ":" in value:
                yield from iterate_fields(strip_parentheses(value.strip()))


def split_methods(spec: str, method_kind: str = "drafter") -> list[str]:
    """The parts of `a+b:x=1`, methods of one kind. A + in the path of a file (`source=@a+b.txt`,
    `path=./a+b`) joins nothing, nor one in a reward's own text (`words=C++`).
    """
    method_specs: list[str] = []
    for spec_piece in split_outside(spec, "+"):
        last_value = method_specs[-1].rpartition(",")[2].partition("=")[2] if method_specs else ""
        within_value = last_value.startswith("@") or "/" in last_value
        within_value |= (
            method_kind == "reward" and bool(method_specs) and not SPEC.match(spec_piece)
        )
        if within_value and spec_piece.partition(":")[0] not in method_names(method_kind):
            method_specs[-1] += f"+{spec_piece}"
        else:
            method_specs.append(spec_piece)
    return method_specs


def resolve_method(
    spec: str | Drafter | Strategy, encode: Encode | None = None
) -> tuple[str, Strategy]:
    """(name, strategy) of a spec string or a config object. Raises UnknownMethod or BadConfig.

    `encode`: the tokenizer's text -> ids without special tokens, for fields that name a text file.
    """
    if not isinstance(spec, str):
        return _resolve_config(spec)
    named_parts: list[tuple[str, str, dict[str, str]]] = []
    for method_spec in split_methods(AUTO if spec == "auto" else spec):
        name, _, field_specs = method_spec.partition(":")
        named_parts.append((name, kind_of(name), _parse_options(spec, field_specs)))
    name, kind, options = named_parts[-1]
    if len(named_parts) == 1 and kind != "drafter":
        return name, build_method(name, kind, options, encode)
    for part_name, kind, part_options in named_parts:
        if kind != "drafter":
            raise BadConfig(
                f"{spec!r}: {part_name} is a {kind}; only drafters can be joined by '+'"
            )
        shared_options = sorted({"rule", "nodes"} & part_options.keys())
        if shared_options and part_options is not options:
            raise BadConfig(
                f"{spec!r}: {shared_options[0]} is for all drafters together; write it after the "
                f"last, {name}"
            )
    return _build_speculative(named_parts, encode)


def build_reward(spec: str | Reward, encode: Encode | None = None) -> Reward:
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
    mean_parts: list[Reward] = []
    weights: list[float] = []
    reward_specs = split_methods(spec, "reward")
    for reward_spec in reward_specs:
        name, _, field_specs = reward_spec.partition(":")
        options = _parse_options(spec, field_specs)
        if len(reward_specs) > 1:
            weights.append(_parse_value(f"{name}:weight", float, options.pop("weight", "1"), None))
        mean_parts.append(build_method(name, "reward", options, encode))
    return mean_parts[0] if len(mean_parts) == 1 else Mean(tuple(mean_parts), tuple(weights))


def with_reward(
    spec: str | Drafter | Strategy, reward: str | Reward, encode: Encode | None = None
) -> tuple[str, Strategy]:
    """Resolves a method, see `resolve_method`, that chooses by this reward. Raises BadConfig for a
    method that chooses by none.
    """
    chosen_reward = build_reward(reward, encode)
    name = spec.partition(":")[0] if isinstance(spec, str) else _resolve_config(spec)[0]
    if not isinstance(spec, str):
        field_names = [field.name for field in dataclasses.fields(spec)]  # type: ignore[arg-type]
    elif name in method_names("strategy"):
        field_names = [field.name for field in dataclasses.fields(load_method(name, "strategy"))]
    else:
        field_names = []
    if "reward" not in field_names:
        raise BadConfig(
            f"reward={reward!r}: {name} chooses among no texts; leave it out, or take a method "
            "that does, such as best-of"
        )
    if not isinstance(spec, str):
        config: Any = spec
        return _resolve_config(dataclasses.replace(config, reward=chosen_reward))
    options = _parse_options(spec, spec.partition(":")[2])
    if "reward" in options:
        raise BadConfig(f"{spec!r} has a reward of its own, and another is given: leave one out")
    return name, build_method(name, "strategy", {**options, "reward": chosen_reward}, encode)


def build_guidance(spec: str | Source, encode: Encode | None = None) -> Source:
    """The source of rows that a spec string or a config object means. Raises UnknownMethod or
    BadConfig.
    """
    from foretell.core.source import Source

    if isinstance(spec, Source):
        return spec
    if not isinstance(spec, str) or not spec:
        raise BadConfig.field("guidance", spec, "a spec like 'cfg:g=1.5', or a config object")
    name, _, field_specs = spec.partition(":")
    source: Source = build_method(name, "guidance", _parse_options(spec, field_specs), encode)
    return source


def build_cache_policy(spec: str | KV) -> KV:
    """The cache policy that a spec string or a config object means, several joined by `+`. Raises
    UnknownMethod or BadConfig.
    """
    from foretell.kv.base import KV
    from foretell.kv.store.composition import Composition

    if isinstance(spec, KV):
        return spec
    if not isinstance(spec, str) or not spec:
        raise BadConfig.field("kv", spec, "a spec like 'snapkv:budget=1024', or a config object")
    policy_parts: list[KV] = []
    for policy_spec in split_methods(spec, "kv"):
        name, _, field_specs = policy_spec.partition(":")
        policy_parts.append(build_method(name, "kv", _parse_options(spec, field_specs)))
    return policy_parts[0] if len(policy_parts) == 1 else Composition(tuple(policy_parts))


def build_processors(
    spec: str | Processor | Sequence[Processor], encode: Encode | None = None
) -> tuple[Processor, ...]:
    """The processors that a spec string or config objects mean, several joined by `+`. Raises
    UnknownMethod or BadConfig.
    """
    from foretell.core.processor import Processor

    if isinstance(spec, Processor):
        return (spec,)
    if isinstance(spec, list | tuple) and all(
        isinstance(processor, Processor) for processor in spec
    ):
        return tuple(spec)
    if not isinstance(spec, str) or not spec:
        expected = "a spec like 'momentum' or 'momentum+rpg', or config objects"
        raise BadConfig.field("processor", spec, expected)
    built_processors = []
    for warper_spec in split_outside(spec, "+"):
        name, _, field_specs = warper_spec.partition(":")
        built_processors.append(
            build_method(name, "processor", _parse_options(spec, field_specs), encode)
        )
    return tuple(built_processors)


def build_constraint(spec: str, encode: Encode | None = None) -> TextConstraint:
    """The constraint that a spec string means. Raises UnknownMethod or BadConfig."""
    if not spec:
        raise BadConfig.field("constraint", spec, "a spec like 'monitor:root=FOLDER', or an object")
    name, _, field_specs = spec.partition(":")
    built_constraint: TextConstraint = build_method(
        name, "constraint", _parse_options(spec, field_specs), encode
    )
    return built_constraint


def _resolve_config(config: Drafter | Strategy) -> tuple[str, Strategy]:
    """Resolves a config object: (name, strategy)."""
    # Imported here, since checking a name must not import torch.
    from foretell.core.drafter import Drafter
    from foretell.speculation.composition import Composition
    from foretell.speculation.strategy import Speculative

    drafter = config.drafter if isinstance(config, Speculative) else config
    drafter_parts = drafter.parts if isinstance(drafter, Composition) else (drafter,)
    part_names = [
        type(part).__module__.rpartition(".")[2].replace("_", "-") for part in drafter_parts
    ]
    return "+".join(part_names), Speculative(config) if isinstance(config, Drafter) else config


def _parse_options(spec: str, field_specs: str) -> dict[str, str]:
    """Reads `n=3,k=10` into a dict."""
    options = {}
    for field_spec in filter(None, split_outside(field_specs, ",")):
        field_name, equals, value = field_spec.partition("=")
        if not equals:
            raise BadConfig(f"{spec!r}: write fields as name=value, as in ngram:n=3,k=10")
        options[field_name.strip()] = value.strip()
    return options


def _build_speculative(
    named_parts: list[tuple[str, str, dict[str, str]]], encode: Encode | None
) -> tuple[str, Strategy]:
    """The strategy of one drafter or of several joined ones; the last has `rule` and `nodes`."""
    from foretell.speculation.composition import Composition
    from foretell.speculation.strategy import Speculative

    last_name, kind, options = named_parts[-1]
    rule_spec = options.pop("rule", "default")
    node_count = options.pop("nodes", "0")
    if not node_count.isdecimal():
        raise BadConfig.field(f"{last_name}:nodes", node_count, "a whole number from 0")
    rule_options: dict[str, str] = {}
    if rule_spec != "default":
        drafter_fields = {field.name for field in dataclasses.fields(load_method(last_name, kind))}
        rule_options = {key: options.pop(key) for key in list(options) if key not in drafter_fields}
    drafters = [
        build_method(name, "drafter", part_options, encode) for name, _, part_options in named_parts
    ]
    drafter = drafters[0] if len(drafters) == 1 else Composition(tuple(drafters))
    built_rule = None if rule_spec == "default" else build_method(rule_spec, "rule", rule_options)
    name = "+".join(name for name, _, _ in named_parts)
    return name, Speculative(drafter, built_rule, int(node_count))
