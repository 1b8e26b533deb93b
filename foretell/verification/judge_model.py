"""A linear judge of a target's own states: is a drafted token as good as the target's?

It reads the state that leaves the target's last layer, before the last norm, at the drafted token
itself, and is kept in a safetensors file, which `foretell train judge` writes:

    weight    (E,)  bias  (1,)   of the chance sigmoid(weight state + bias) that the token is good
    excluded  (n,)               tokens that are never judged: those that end or frame a text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.functional import logsigmoid

from foretell.errors import BadFile, Unsupported, first_line
from foretell.ops.assets import ASSETS
from foretell.ops.files import whole
from foretell.ops.fingerprint import norm_mark

SCHEMA = "foretell.judge/1"
MAKE = "make one with `foretell train judge`"
FILE = "judge.safetensors"


@dataclass(frozen=True, eq=False)
class LinearJudge:
    """weight (E,), bias (). `norm`: the mark of the target that it was made for."""

    weight: torch.Tensor
    bias: torch.Tensor
    excluded: frozenset[int] = frozenset()
    norm: str = ""

    @property
    def width(self) -> int:
        """E, numbers of a state."""
        return len(self.weight)

    @torch.inference_mode()
    def chances(self, states: torch.Tensor) -> list[float]:
        """States (n, E) -> how likely these n tokens are to be good."""
        return list(self._scores(states).sigmoid().tolist())

    @torch.inference_mode()
    def log_chances(self, states: torch.Tensor) -> list[float]:
        """Their logarithms, exact also where a chance would be rounded to 0."""
        return list(logsigmoid(self._scores(states)).tolist())

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        return states.float().cpu() @ self.weight + self.bias


def save(judge: LinearJudge, path: Path) -> None:
    """Writes the file, whole or not at all. Raises BadFile."""
    tensors = {
        "weight": judge.weight.float().contiguous(),
        "bias": judge.bias.float().reshape(1),
        "excluded": torch.tensor(sorted(judge.excluded), dtype=torch.int32),
    }
    with whole(path) as part:
        save_file(tensors, part, {"schema": SCHEMA, "norm": judge.norm})


def load(path: str | Path, make: str = MAKE) -> LinearJudge:
    """The judge in a file; `make`: what makes one. Raises BadFile where it cannot be read, is
    damaged or is no judge.
    """
    try:
        with safe_open(path, "pt") as opened:
            about = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{path}: cannot be read ({first_line(error)}); {make}") from error
    if about.get("schema") != SCHEMA or tensors.keys() != {"weight", "bias", "excluded"}:
        raise BadFile(f"{path}: has not the schema {SCHEMA}; {make}")
    weight, bias, excluded = (tensors[name] for name in ("weight", "bias", "excluded"))
    if weight.ndim != 1 or bias.shape != (1,) or excluded.ndim != 1:
        raise BadFile(f"{path}: is damaged (its tensors are not those of a judge); {make}")
    if not bool(weight.isfinite().all() & bias.isfinite().all()):
        raise BadFile(f"{path}: is damaged (a weight is not a finite number); {make}")
    tokens = frozenset(int(token) for token in excluded.tolist())
    return LinearJudge(weight.float(), bias.float()[0], tokens, about.get("norm", ""))


def classifier_of(target: Any, path: str) -> LinearJudge:
    """One in a file of this form that says how likely a text is to have some attribute. Raises
    BadFile where the file is damaged, or was made for another target.
    """
    make = "make one with `foretell train attribute`"
    judge = load(path, make)
    if judge.norm != norm_mark(target):
        raise BadFile(
            f"{path}: was made for another target than {target.name}, whose states mean something "
            f"else; {make}"
        )
    check_width(judge, target, path, make)
    return judge


def judge_of(target: Any, path: str) -> LinearJudge:
    """The judge in a file; "": the one that ships for this target, or that it has itself.

    Raises Unsupported where the target shows no states or none ships for it; BadFile where the file
    is damaged, or was made for another target, whose states mean something else.
    """
    if "taps" not in target.caps:
        cure = "choose another rule"
        raise Unsupported.missing("rule judge", target.name, "hidden states of the target", cure)
    own = getattr(target, "judge", None)
    if own is not None and not path:
        made: LinearJudge = own()
        return made
    mark = norm_mark(target)
    found = path or _shipped().get(mark, "")
    if not found:
        cure = f"give rule=judge,weights=FILE; {MAKE}"
        need = "a judge, and none ships for this model"
        raise Unsupported.missing("rule judge", target.name, need, cure)
    judge = load(found)
    if judge.norm != mark:
        raise BadFile(f"{found}: was made for another target than {target.name}; {MAKE} for it")
    check_width(judge, target, found, MAKE)
    return judge


def check_width(judge: LinearJudge, target: Any, path: str, make: str) -> None:
    """Raises BadFile where it reads states of another width than the target's. A target that does
    not show its layers is known by the first state.
    """
    width, loop = len(judge.weight), getattr(target, "loop", None)
    own = width if loop is None else loop.norm.weight.numel()
    if width != own:
        raise BadFile(
            f"{path}: reads states of {width} numbers, and {target.name} has {own}; {make}"
        )


@cache
def _shipped() -> dict[str, str]:
    """The file of each judge that comes with the package, by its target's mark."""
    return {load(path).norm: str(path) for path in sorted(ASSETS.glob(f"*/{FILE}"))}


def states_of(reply: Any, nodes: Sequence[int]) -> torch.Tensor:
    """(n, E): what leaves the last layer at these nodes, of a reply whose highest tap it is."""
    places = {node: place for place, node in enumerate(reply.new)}
    states: torch.Tensor = reply.hidden[max(reply.hidden)]
    return states[[places[node] for node in nodes]]
