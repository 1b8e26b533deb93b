"""What tells a model from others of its shape, for files that are made for one target."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def fingerprint(model: Any) -> dict[str, str]:
    """Marks of its last norm, its tokens and its chat template, whatever its number format."""
    told = {"norm": norm_mark(model)}
    tokenizer = model.tokenizer
    if tokenizer is not None:
        words = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]))
        told["tokens"] = _hashed(words.encode())
        told["template"] = _hashed(str(getattr(tokenizer, "chat_template", "") or "").encode())
    return told


def norm_mark(model: Any) -> str:
    """The mark of its last norm; empty where its layers do not run one by one."""
    loop = getattr(model, "loop", None)
    if loop is None:
        return ""
    return _hashed(loop.norm.weight.detach().float().cpu().numpy().tobytes())


def _hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
