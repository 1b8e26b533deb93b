"""Defaults of a model: how long an answer may be, and what `auto` stands for on
a model before anybody tunes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.core.masked_text import MASKS, default_filler
from foretell.core.sampling_options import ANSWER_TOKENS, CANVAS_TOKENS
from foretell.core.tokenizer_bytes import are_related
from foretell.drafters.heads.attach import shipped_head
from foretell.spec import AUTO, CHEAP, DRAFT, HEAD, HEAD_STEP, QUICK, STATIC, STEP

if TYPE_CHECKING:
    from foretell.core.model import Model


def answer_tokens(target: Model) -> int:
    """How many tokens an answer of this model has at most."""
    return CANVAS_TOKENS if "canvas" in target.caps else ANSWER_TOKENS


def simplest_method(target: Model) -> str:
    """A method that asks nothing but the target."""
    return default_filler(target) if "canvas" in target.caps else "plain"


def baseline_method(target: Model) -> str:
    """The method that others are measured against: one forward of the target, one token."""
    return STATIC if MASKS in target.caps else simplest_method(target)


def default_method(target: Model, draft: Model | None, step: float) -> str:
    """spec.AUTO, or spec.QUICK where a plain step (seconds) is so quick that asking more drafters
    would take too much of it; and spec.DRAFT, where there is a draft model that is small enough.

    Where a head ships for a model that is not too quick for it, spec.QUICK and spec.HEAD: beside a
    head the others of spec.AUTO cost more than they add.
    """
    if step >= HEAD_STEP and shipped_head(target, HEAD.partition(":")[0]):
        return f"{QUICK}+{HEAD}"
    method = QUICK if step < STEP else AUTO
    is_small = draft is not None and 0 < draft.weight_bytes <= CHEAP * target.weight_bytes
    if draft is not None and is_small and are_related(draft.tokenizer, target.tokenizer):
        return f"{method}+{DRAFT}"
    return method
