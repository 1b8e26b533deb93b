"""foretell: a decoding engine for language models that makes generation faster and proves that
nothing changed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foretell.errors import ForetellError, ForetellWarning
from foretell.lazy import keep_old_names

if TYPE_CHECKING:
    from foretell.api.contexts import Contexts
    from foretell.api.lm import LM
    from foretell.api.outputs import Output, Piece
    from foretell.cards import Card
    from foretell.loading.load import load
    from foretell.loading.transformers import hf
    from foretell.loading.wrap import wrap

__version__ = "0.1.0"
__all__ = [
    "LM",
    "Contexts",
    "ForetellError",
    "ForetellWarning",
    "Output",
    "Piece",
    "hf",
    "load",
    "methods",
    "wrap",
]
_WHERE = {
    "LM": "api.lm",
    "Output": "api.outputs",
    "Piece": "api.outputs",
    "Contexts": "api.contexts",
    "load": "loading.load",
    "wrap": "loading.wrap",
    "hf": "loading.transformers",
}
# So that foretell.drafters.ngram.Ngram(n=3) needs no further import.
_FOLDERS = ("drafters", "strategies", "verification", "guidance", "processors", "constraints")
# Modules that the documentation named, by the names that they had there.
keep_old_names(
    {
        "foretell.core.cache": "foretell.cache.cache",
        "foretell.core.engine": "foretell.engine.engine",
        "foretell.core.strategy": "foretell.speculation.strategy",
        "foretell.diagnosis": "foretell.api.diagnosis",
        "foretell.families.toy": "foretell.testing.toy",
        "foretell.families.views": "foretell.testing.views",
        "foretell.memory.buffers": "foretell.cache.buffers",
        "foretell.memory.job": "foretell.cache.job",
        "foretell.ops.rewards": "foretell.rewards.base",
        "foretell.policy.constraint": "foretell.core.constraint",
        "foretell.policy.warping": "foretell.core.processor",
        "foretell.stats": "foretell.core.stats",
        "foretell.text": "foretell.core.text",
    }
)


def __getattr__(name: str) -> Any:
    """Imports torch only when something that needs it is used, so that listing methods is quick."""
    if name in _WHERE:
        value = getattr(import_module(f"foretell.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    if name in _FOLDERS:
        return import_module(f"foretell.{name}")
    raise AttributeError(f"module 'foretell' has no attribute {name!r}")


def methods() -> list[Card]:
    """The card of every method."""
    from foretell.cards import card
    from foretell.registry import methods as names

    return [card(name) for name in names()]
