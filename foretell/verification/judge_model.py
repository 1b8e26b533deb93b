"""A linear judge of a target's own states: is a drafted token as good as the target's?

It reads the state that leaves the target's last layer, before the last norm, at the drafted token
itself, and is kept in a safetensors file, which `foretell train judge` writes:

    weight    (E,)  bias  (1,)   of the probability sigmoid(weight state + bias) that the token is
    good excluded  (n,)               tokens that are never judged: those that end or frame a text
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

from foretell.errors import BadFile, Unsupported, first_message_line
from foretell.ops.assets import shipped_files
from foretell.ops.files import replace_file
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
    def good_chances(self, states: torch.Tensor) -> list[float]:
        """States (n, E) -> how likely these n tokens are to be good."""
        return list(self._score_states(states).sigmoid().tolist())

    @torch.inference_mode()
    def log_chances(self, states: torch.Tensor) -> list[float]:
        """Their logarithms, exact also where a probability would be rounded to 0."""
        return list(logsigmoid(self._score_states(states)).tolist())

    def _score_states(self, states: torch.Tensor) -> torch.Tensor:
        return states.float().cpu() @ self.weight + self.bias


def save_judge(judge: LinearJudge, path: Path) -> None:
    """Writes the file, whole or not at all. Raises BadFile."""
    tensors = {
        "weight": judge.weight.float().contiguous(),
        "bias": judge.bias.float().reshape(1),
        "excluded": torch.tensor(sorted(judge.excluded), dtype=torch.int32),
    }
    with replace_file(path) as part:
        save_file(tensors, part, {"schema": SCHEMA, "norm": judge.norm})


def load_judge(path: str | Path, how_to_make: str = MAKE) -> LinearJudge:
    """The judge in a file; `how_to_make`: what makes one. Raises BadFile where it cannot be read,
    is damaged or is no judge.
    """
    try:
        with safe_open(path, "pt") as judge_file:
            metadata = judge_file.metadata() or {}
            names = judge_file.keys()
            tensors = {name: judge_file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise BadFile(
            f"{path}: cannot be read ({first_message_line(error)}); {how_to_make}"
        ) from error
    if metadata.get("schema") != SCHEMA or tensors.keys() != {"weight", "bias", "excluded"}:
        raise BadFile(f"{path}: has not the schema {SCHEMA}; {how_to_make}")
    weight, bias, excluded = (tensors[name] for name in ("weight", "bias", "excluded"))
    if weight.ndim != 1 or bias.shape != (1,) or excluded.ndim != 1:
        raise BadFile(f"{path}: is damaged (its tensors are not those of a judge); {how_to_make}")
    if not bool(weight.isfinite().all() & bias.isfinite().all()):
        raise BadFile(f"{path}: is damaged (a weight is not a finite number); {how_to_make}")
    excluded_tokens = frozenset(int(token) for token in excluded.tolist())
    return LinearJudge(weight.float(), bias.float()[0], excluded_tokens, metadata.get("norm", ""))


def classifier_of(target: Any, path: str) -> LinearJudge:
    """A judge in a file of this form that says how likely a text is to have some attribute. Raises
    BadFile where the file is damaged, or was made for another target.
    """
    how_to_make = "make one with `foretell train attribute`"
    judge = load_judge(path, how_to_make)
    if judge.norm != norm_mark(target):
        raise BadFile(
            f"{path}: was made for another target than {target.name}, whose states mean something "
            f"else; {how_to_make}"
        )
    check_width(judge, target, path, how_to_make)
    return judge


def judge_of(target: Any, path: str) -> LinearJudge:
    """The judge in a file; "": the one that ships for this target, or that it has itself.

    Raises Unsupported where the target shows no states or none ships for it; BadFile where the file
    is damaged, or was made for another target, whose states mean something else.
    """
    if "taps" not in target.caps:
        cure = "choose another rule"
        raise Unsupported.missing_capability(
            "rule judge", target.name, "hidden states of the target", cure
        )
    target_judge = getattr(target, "judge", None)
    if target_judge is not None and not path:
        built_judge: LinearJudge = target_judge()
        return built_judge
    target_mark = norm_mark(target)
    judge_path = path or _shipped_judges().get(target_mark, "")
    if not judge_path:
        cure = f"give rule=judge,weights=FILE; {MAKE}"
        need = "a judge, and none ships for this model"
        raise Unsupported.missing_capability("rule judge", target.name, need, cure)
    judge = load_judge(judge_path)
    if judge.norm != target_mark:
        raise BadFile(
            f"{judge_path}: was made for another target than {target.name}; {MAKE} for it"
        )
    check_width(judge, target, judge_path, MAKE)
    return judge


def check_width(judge: LinearJudge, target: Any, path: str, how_to_make: str) -> None:
    """Raises BadFile where it reads states of another width than the target's. A target that does
    not show its layers, or whose last norm has no weights, is known by the first state.
    """
    judge_width, target_loop = len(judge.weight), getattr(target, "loop", None)
    norm_weight = None if target_loop is None else getattr(target_loop.norm, "weight", None)
    target_width = judge_width if norm_weight is None else norm_weight.numel()
    if judge_width != target_width:
        raise BadFile(
            f"{path}: reads states of {judge_width} numbers, and {target.name} has {target_width}; "
            f"{how_to_make}"
        )


@cache
def _shipped_judges() -> dict[str, str]:
    """The file of each judge that comes with the package, by its target's mark."""
    return {load_judge(path).norm: str(path) for path in shipped_files(f"*/{FILE}")}


def states_at_nodes(reply: Any, nodes: Sequence[int]) -> torch.Tensor:
    """(n, E): what leaves the last layer at these nodes, of a reply whose highest tap it is."""
    row_positions = {node: place for place, node in enumerate(reply.new)}
    last_states: torch.Tensor = reply.hidden[max(reply.hidden)]
    return last_states[[row_positions[node] for node in nodes]]
