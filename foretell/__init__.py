"""foretell: a decoding engine for language models that makes generation faster and proves that
nothing changed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foretell.errors import ForetellError, ForetellWarning

if TYPE_CHECKING:
    from foretell.api import LM
    from foretell.cards import Card
    from foretell.contexts import Contexts
    from foretell.custom_generate import hf
    from foretell.loading import load
    from foretell.outputs import Output, Piece
    from foretell.wrapping import wrap

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
    "LM": "api",
    "Output": "outputs",
    "Piece": "outputs",
    "wrap": "wrapping",
    "load": "loading",
    "hf": "custom_generate",
    "Contexts": "contexts",
}
# So that foretell.drafters.ngram.Ngram(n=3) needs no further import.
_FOLDERS = ("drafters", "strategies", "rules", "rows", "warp", "constraints")


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
