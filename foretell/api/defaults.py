"""What holds where nobody says otherwise: how long an answer may be, and what `auto` stands for on
a model before anybody tunes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.core.masked_text import MASKS, filler
from foretell.core.sampling_options import ANSWER_TOKENS, CANVAS_TOKENS
from foretell.core.tokenizer_bytes import related
from foretell.drafters.heads.attach import shipped_head
from foretell.spec import AUTO, CHEAP, DRAFT, HEAD, HEAD_STEP, QUICK, STATIC, STEP

if TYPE_CHECKING:
    from foretell.core.model import Model


def answer_tokens(target: Model) -> int:
    """How many tokens an answer of this model has at most."""
    return CANVAS_TOKENS if "canvas" in target.caps else ANSWER_TOKENS


def simplest(target: Model) -> str:
    """A method that asks nothing but the target."""
    return filler(target) if "canvas" in target.caps else "plain"


def baseline(target: Model) -> str:
    """What other methods are measured against: one forward of the target, one token."""
    return STATIC if MASKS in target.caps else simplest(target)


def usual(target: Model, draft: Model | None, step: float) -> str:
    """spec.AUTO, or spec.QUICK where a plain step (seconds) is so quick that asking more drafters
    would take too much of it; and spec.DRAFT, where there is a draft model that is small enough.

    Where a head ships for a model that is not too quick for it, spec.QUICK and spec.HEAD: beside a
    head the others of spec.AUTO cost more than they add.
    """
    if step >= HEAD_STEP and shipped_head(target, HEAD.partition(":")[0]):
        return f"{QUICK}+{HEAD}"
    method = QUICK if step < STEP else AUTO
    small = draft is not None and 0 < draft.weight_bytes <= CHEAP * target.weight_bytes
    if draft is not None and small and related(draft.tokenizer, target.tokenizer):
        return f"{method}+{DRAFT}"
    return method
