"""Refusals of methods: options, sources and cache policies that they cannot honour, and asks that a
model cannot answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.core.source import Direct
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.core.model import Model
    from foretell.core.request import Request
    from foretell.core.sampling_options import Sampling
    from foretell.core.types import Ask


def source_name(source: object) -> str:
    """Name of a source of rows, as users write it."""
    return type(source).__name__.lower()


def refuse_options(name: str, sampling: Sampling, reasons: Mapping[str, str]) -> None:
    """Raises BadConfig for an option that method `name` cannot honour; `reasons` says why not."""
    default_options = type(sampling)()
    for option, reason in reasons.items():
        value = getattr(sampling, option)
        if value != getattr(default_options, option):
            refused_option = f"{name} cannot honour {option}={value!r}"
            raise BadConfig(f"{refused_option}: {reason}; leave {option} out")


def refuse_source(name: str, request: Request) -> None:
    """Raises BadConfig where a request has a source of rows, and method `name` reads the target."""
    if not (request.source is None or isinstance(request.source, Direct)):
        source = source_name(request.source)
        raise BadConfig(
            f"guidance: {name} reads the target itself, and the rows of {source!r} are none of its "
            "own; leave guidance out, or take another method"
        )


def refuse_policy(name: str, request: Request) -> None:
    """Raises BadConfig where a request's cache rows are evicted, and method `name` looks at trees
    wherever it stands: those would have to end where rows change.
    """
    if request.policy is not None:
        policy = request.policy.name or type(request.policy).__name__
        raise BadConfig(
            f"{name} cannot run under the cache policy {policy}: what it looks at may cross a "
            "change of the rows; leave the policy out, or take another method"
        )


def unmet_capability(model: Model, ask: Ask) -> tuple[str, Any] | None:
    """The capability that `ask` needs and `model` has not, with what needs it."""
    if ask.taps and "taps" not in model.caps:
        return "hidden states", ask.taps
    if ask.layers is not None and "layers" not in model.caps:
        return "running a part of its layers", ask.layers
    halves = [part for part in ask.layers or () if not isinstance(part, int)]
    if halves and "parts" not in model.caps:
        return "running halves of its layers", halves[0]
    if ask.states is not None and "layers" not in model.caps:
        return "entering its layers with given states", tuple(ask.states.shape)
    if "tree" not in model.caps and not ask.tree.is_chain:
        return "branching trees", len(ask.tree)
    return None
