"""Arguments of `LM.generate`: their names, one value for each prompt, and what a request takes of
them beside its sampling.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from foretell.api.defaults import answer_tokens
from foretell.cache.policy import Segment
from foretell.core.masked_text import canvas_of
from foretell.core.renamed_options import rename_options
from foretell.core.spending import spending_of
from foretell.core.types import Sampling
from foretell.errors import BadConfig, UnknownMethod, Unsupported
from foretell.spec import Encode, build_cache_policy, build_guidance

if TYPE_CHECKING:
    from foretell.core.model import Model

FIELDS = {field.name for field in dataclasses.fields(Sampling)}
# Sampling arguments whose own value is a sequence or mapping. For the others a list is one value a
# prompt.
NESTED = {"logit_bias", "bad_words", "stop", "stop_token_ids", "logits_processors"}
# Of a request beside its sampling.
TERMS = {
    *("tenant", "priority", "timeout", "trace", "pictures", "guidance", "reward", "budget", "kv"),
    *("prefix", "canvas"),
}


def token_id(value: Any) -> int | None:
    """A whole number, also one of numpy's or torch's, as an int; None: it is something else."""
    if type(value) is int:
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return None


def per_prompt(name: str, value: Any, count: int, is_list: bool) -> list[Any]:
    """Values of an argument, one for each prompt. Raises BadConfig where their numbers differ."""
    splits = is_list and isinstance(value, list)
    if splits and name in NESTED:
        splits = _has_one_entry_a_prompt(name, value)
    if not splits:
        return [value] * count
    if len(value) != count:
        raise BadConfig(
            f"{name}: {len(value)} values for {count} prompts; give one, or one a prompt"
        )
    return list(value)


def _has_one_entry_a_prompt(name: str, value: list[Any]) -> bool:
    """Whether a list given for a nested argument holds a value for each prompt, or is one value."""
    for entry in value:
        if entry is None:
            return True
        if name != "bad_words":
            if isinstance(entry, list | tuple | Mapping):
                return True
        elif isinstance(entry, list | tuple) and (not entry or token_id(entry[0]) is None):
            return True  # a list of lists; one of texts and ids is meant for one prompt
    return False


def known_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` by their names of today. Raises UnknownMethod for another name."""
    renamed = rename_options(arguments, FIELDS | TERMS)
    for name in renamed:
        if name not in FIELDS | TERMS:
            raise UnknownMethod.suggest_names("argument", name, FIELDS | TERMS | {"method"})
    return renamed


def split_terms(
    options: Mapping[str, Any], encode: Encode, target: Model
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits off a request's terms, as fields of Request; returns them and the other arguments."""
    tenant = options.get("tenant", "")
    priority = options.get("priority", 0)
    timeout = options.get("timeout")
    if not isinstance(tenant, str):
        raise BadConfig.field("tenant", tenant, "a name, as text")
    if type(priority) is not int:
        raise BadConfig.field("priority", priority, "a whole number")
    trace = options.get("trace", False)
    if not isinstance(trace, bool):
        raise BadConfig.field("trace", trace, "True or False")
    deadline = math.inf
    if timeout is not None:
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not is_number or not timeout > 0:
            raise BadConfig.field("timeout", timeout, "seconds above 0, or None")
        deadline = time.perf_counter() + timeout
    terms = {"tenant": tenant, "priority": priority, "deadline": deadline, "trace": trace}
    terms["pictures"] = options.get("pictures")
    terms["reward"] = options.get("reward")
    terms["budget"] = spending_of(options.get("budget"))
    guidance = options.get("guidance")
    terms["source"] = None if guidance is None else build_guidance(guidance, encode)
    kv = options.get("kv")
    terms["policy"] = None if kv is None else build_cache_policy(kv).build_named(target)
    terms["prefix"] = options.get("prefix")
    terms["canvas"] = options.get("canvas")
    if terms["canvas"] is not None and "canvas" not in target.caps:
        need = "a model that fills canvases"
        raise Unsupported.missing_capability("fill", target.name, need, "use generate")
    if terms["canvas"] is not None:
        mask_id = getattr(target, "mask_id", None)
        terms["canvas"] = canvas_of(terms["canvas"], target.vocab, mask_id)
    if not isinstance(terms["prefix"], Segment | None):
        raise BadConfig.field("prefix", terms["prefix"], "rows that an editor has made, or None")
    sampling_options = {name: value for name, value in options.items() if name not in TERMS}
    return terms, {"max_new_tokens": answer_tokens(target), **sampling_options}


def as_python(value: Any) -> Any:
    """A number of numpy's or torch's as Python's; anything else as it is."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or callable(value) or token_id(value) is not None:
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise BadConfig.field(name, value, "a list")
    return tuple(value)


def read_bias(value: Any) -> dict[int, float]:
    try:
        bias = {int(token): float(number) for token, number in value.items()}
    except (AttributeError, TypeError, ValueError):
        bias = {0: math.nan}
    if not all(number < math.inf for number in bias.values()):
        raise BadConfig.field(
            "logit_bias", value, "a mapping of token ids to numbers below infinity"
        )
    return bias
