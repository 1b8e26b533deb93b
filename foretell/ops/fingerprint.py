"""What tells a model from others of its shape, for files that are made for one target."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def fingerprint(model: Any) -> dict[str, str]:
    """Marks of a model's last norm, its tokens and its chat template, whatever its number
    format.
    """
    model_marks = {"norm": norm_mark(model)}
    tokenizer = model.tokenizer
    if tokenizer is not None:
        vocabulary_json = json.dumps(
            sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        )
        model_marks["tokens"] = _hash_bytes(vocabulary_json.encode())
        model_marks["template"] = _hash_bytes(
            str(getattr(tokenizer, "chat_template", "") or "").encode()
        )
    return model_marks


def norm_mark(model: Any) -> str:
    """The mark of a model's last norm; empty where its layers do not run one by one, or where the
    norm has no weights (OLMo's).
    """
    layer_loop = getattr(model, "loop", None)
    weight = None if layer_loop is None else getattr(layer_loop.norm, "weight", None)
    if weight is None:
        return ""
    return _hash_bytes(weight.detach().float().cpu().numpy().tobytes())


def _hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
