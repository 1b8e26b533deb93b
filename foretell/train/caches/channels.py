"""Which channels of a model's keys matter, from texts: the table that `kv=double-sparsity` reads.

As in Double Sparsity (arXiv:2408.07092), the model reads some hundred pieces of text once, and
nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import BadConfig
from foretell.kv.select.channels import measure_channels, save_channels

if TYPE_CHECKING:
    from foretell.api.lm import LM

LEAST = 8  # tokens of a piece
Tell = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class FindChannels:
    """How much is read. Lengths are in tokens."""

    samples: int = 256  # pieces of text
    length: int = 512  # tokens of each
    each: int = 4  # pieces of one document at most

    def __post_init__(self) -> None:
        for name, lower in (("samples", 1), ("length", LEAST), ("each", 1)):
            if getattr(self, name) < lower:
                raise BadConfig.field(name, getattr(self, name), f"at least {lower}")


def cut_pieces(lm: LM, documents: Iterable[str], config: FindChannels) -> Iterator[list[int]]:
    """The beginnings of documents, in pieces; what is shorter than LEAST is left out."""
    remaining_pieces = config.samples
    length = min(config.length, lm.models["target"].context)
    for document in documents:
        tokens = lm.encode(document, special=False)[: config.each * length]
        for first_token in range(0, len(tokens) - LEAST + 1, length):
            if not remaining_pieces:
                return
            remaining_pieces -= 1
            yield tokens[first_token : first_token + length]


def find_channels(
    lm: LM, documents: Iterable[str], out: Path, config: FindChannels, tell: Tell | None = None
) -> dict[str, Any]:
    """Writes the table of `lm`'s target, and says how much it was made of. Raises BadConfig where
    the documents are too short, and Unsupported.
    """
    pieces_read = 0

    def noted() -> Iterator[list[int]]:
        nonlocal pieces_read
        for piece in cut_pieces(lm, documents, config):
            if tell is not None:
                tell("reading", pieces_read, config.samples)
            yield piece
            pieces_read += 1

    target = lm.models["target"]
    importance, tokens = measure_channels(target, noted())
    if not tokens:
        raise BadConfig(f"the texts have no piece of {LEAST} tokens; give longer ones")
    save_channels(importance, out, target, tokens)
    share = importance.sort(-1, descending=True).values.cumsum(-1) / importance.sum(-1)[..., None]
    quarter = share[..., max(0, importance.shape[-1] // 4 - 1)].mean()
    return {"pieces": pieces_read, "tokens": tokens, "quarter": round(float(quarter), 4)}
