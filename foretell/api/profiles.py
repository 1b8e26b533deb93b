"""The profiles that `foretell tune` keeps: where they lie, when they hold, and what is trusted.

A profile is a JSON file of the user's cache folder. It holds for one model (its place and weights),
draft model, number format, device, number of threads and version. Anybody who can write to that
folder can edit it, so everything that is read from it is tested; above all the method that `auto`
is to stand for, which must be exact, must be able to draft nothing, and may open no file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from foretell.cards import card, weakest_guarantee
from foretell.core.model import Model
from foretell.engine.cost_profile import folder, model_traits
from foretell.errors import ForetellError
from foretell.registry import kind_of
from foretell.spec import iterate_fields, resolve_method, split_methods
from foretell.speculation.strategy import Speculative

SCHEMA = "foretell.tune/2"
LARGEST = 1e6  # of a ratio of speeds, or of seconds; a file that says more is wrong
CURE = "run `foretell tune`, or `foretell tune --forget`"
# Of its conditions those that change under a profile, which is then out of date. Where others
# differ, somebody runs the model in another way than it was tuned for, and nothing is wrong.
AGEING = ("weights", "torch", "version")


def weights_digest(model: Model | None) -> str:
    """A digest of a few numbers of every weight; "none" without a model.

    It is the same in every number format that rounds them alike.
    """
    if model is None:
        return "none"
    hf = getattr(model, "hf", None)
    kind = type(hf or model).__name__
    digest = hashlib.sha256(f"{kind} {model.vocab} {model.layout}".encode())
    if isinstance(hf, torch.nn.Module):
        parts = []
        for parameter in hf.parameters():
            if count := parameter.numel():
                sample = parameter.detach().reshape(-1)[:: max(1, count // 8)][:8]
                parts.append(sample.to(torch.bfloat16))
        if parts:
            digest.update(torch.cat(parts).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def current_conditions(models: Mapping[str, Model]) -> dict[str, str]:
    """Conditions that a profile of these models holds for, by name."""
    target = models["target"]
    return {
        "weights": weights_digest(target),
        "draft model": weights_digest(models.get("draft")),
        **model_traits(target),
    }


def path_of(
    models: Mapping[str, Model], source: Path | None, profile_conditions: Mapping[str, str]
) -> Path:
    """Path of the profile with these conditions. `source`: the model's folder, if it has one.

    The names of all profiles of one model begin alike.
    """
    conditions_digest = hashlib.sha256(
        json.dumps(profile_conditions, sort_keys=True).encode()
    ).hexdigest()[:16]
    return (
        folder()
        / "tuned"
        / f"{_name_beginning(models['target'].name, source)}-{conditions_digest}.json"
    )


def _name_beginning(name: str, source: Path | None) -> str:
    model = name if source is None else str(source.resolve())
    return hashlib.sha256(model.encode()).hexdigest()[:16]


def forget_profiles(name: str, source: Path | None) -> int:
    """Deletes every profile of the model of this name, or of this folder; returns how many. Raises
    OSError.
    """
    files = sorted((folder() / "tuned").glob(f"{_name_beginning(name, source)}-*.json"))
    for file in files:
        file.unlink()
    return len(files)


def load_profile(
    models: Mapping[str, Model], source: Path | None
) -> tuple[dict[str, Any] | None, str]:
    """The profile of these models here, or None; beside it one line that says why one that exists
    is not used, or "".
    """
    conditions_here = current_conditions(models)
    path = path_of(models, source, conditions_here)
    try:
        profile = read_profile(path)
    except ValueError as error:
        return None, f"{path}: the profile {error} and is not used; {CURE}"
    except OSError:
        return None, _other_conditions(models["target"].name, path, conditions_here)
    if profile["about"] != conditions_here:
        fault = "is of another model or machine than its name says"
        return None, f"{path}: the profile {fault} and is not used; {CURE}"
    return profile, ""


def _other_conditions(name: str, path: Path, conditions_here: Mapping[str, str]) -> str:
    """Tells what changed since the latest profile of this model, run in this way, was made; "" if
    there is none.
    """
    latest = 0.0
    latest_conditions: Mapping[str, str] = {}
    stable_traits = {key: value for key, value in conditions_here.items() if key not in AGEING}
    for other_file in path.parent.glob(f"{path.name.partition('-')[0]}-*.json"):
        try:
            changed_time = other_file.stat().st_mtime
            conditions_there = read_profile(other_file)["about"]
        except (OSError, ValueError):
            continue
        if changed_time > latest and stable_traits.items() <= conditions_there.items():
            latest, latest_conditions = changed_time, conditions_there
    if not latest_conditions:
        return ""
    differences = []
    for key in AGEING:
        if latest_conditions.get(key) != conditions_here[key]:
            difference = (
                key
                if key == "weights"
                else f"{latest_conditions.get(key)} there, {conditions_here[key]} here"
            )
            differences.append(difference)
    listing = "; ".join(differences)
    return f"the profile of {name} is out of date ({listing}) and is not used; {CURE}"


# --- what is trusted


def find_objection(spec: str) -> str | None:
    """Why `auto` may not stand for this method; None if it may.

    It may for methods that are exact, open no file, and may draft nothing where that is quicker,
    at every temperature.
    """
    try:
        for piece in split_methods(spec):
            kind_of(piece.partition(":")[0])
        for method, option, value in iterate_fields(spec):
            if reason := _option_objection(method, option, value):
                return reason
        name, strategy = resolve_method(spec)
        if weakest_guarantee(name) != "exact":
            return "it is not exact"
    except ForetellError as error:
        return " ".join(str(error).split())
    if not isinstance(strategy, Speculative):
        return None if name == "plain" else "it does not decide by cost"
    drafter = strategy.drafter
    if strategy.nodes or strategy.rule or drafter.draws or drafter.whole:
        return "it does not decide by cost at every temperature"
    return None


def _option_objection(method: str, option: str, value: str) -> str | None:
    """Fault of a method's option, which has not been used yet; None: it has none."""
    if option == "rule":
        return "it has a rule of its own"
    default = card(method, kind_of(method)).defaults.get(option)
    if isinstance(default, str) or value.startswith("@"):
        return f"its option {option} names a file"
    return None


def read_profile(path: Path) -> dict[str, Any]:
    """The profile in a file. Raises OSError, or ValueError, which says what is wrong with it."""
    try:
        profile = json.loads(path.read_text("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ValueError("is damaged") from None
    if not isinstance(profile, dict) or profile.get("schema") != SCHEMA:
        raise ValueError(f"is not of schema {SCHEMA}")
    for key, fits in FIELDS.items():
        if key not in profile or not fits(profile[key]):
            raise ValueError(f"is damaged ({key!r} is missing or wrong)")
    if reason := find_objection(profile["chosen"]):
        raise ValueError(f"names a method that `auto` may not stand for ({reason})")
    return profile


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)  # JSON has no NaN and no Infinity


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= LARGEST


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_final(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and _is_text(value.get("challenger"))
        and _are_numbers(value.get("means"))
    )


FIELDS: dict[str, Callable[[Any], bool]] = {
    "about": _are_texts,
    "model": lambda value: isinstance(value, str),
    "default": _is_text,
    "chosen": _is_text,
    "means": _are_numbers,
    "final": _is_final,
    "best": _are_texts,
    "shown_only": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "file": lambda value: isinstance(value, str),
    "seconds": _is_number,
    "bench": lambda value: isinstance(value, dict),
}
