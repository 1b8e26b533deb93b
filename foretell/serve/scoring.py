"""Log-probabilities of a prompt's own tokens, for `echo` with `logprobs`, and their places in it.

The prompt is generated again, token by given token: as a request among others, in pieces, so that
nobody waits for the whole of a long one.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Kept, Reply, Steps
from foretell.speculation.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretell.core.context import Context

CHUNK = 128  # tokens of one forward
NEAR = 16  # bytes within which a token is looked for


@dataclass(frozen=True)
class Given(Strategy):
    """Says these tokens, whatever the target would say."""

    tokens: tuple[int, ...]

    def run(self, ctx: Context) -> Steps:
        said = 0
        while True:
            tokens = list(self.tokens[said : said + CHUNK])
            tree = TokenTree(ctx.tokens[-1]).chain(tokens[:-1])
            reply: Reply = yield Ask(tree, branch=ctx.branch)
            kept: Kept = yield Commit(tokens, reply.logits, ctx.branch, ["target"] * len(tokens))
            said += len(kept.tokens)
            if kept.reason:
                return


def scoring(prompts: Sequence[Sequence[int]], best: int, **terms: Any) -> dict[str, Any]:
    """What to call `LM.generate` or `agenerate` with, so that the `logprobs` of the outputs are
    those of each prompt from its second token on. `terms`: tenant, priority, timeout.
    """
    return {
        "prompt": [[ids[0]] for ids in prompts],
        "method": [Given(tuple(ids[1:])) for ids in prompts],
        "max_new_tokens": [len(ids) - 1 for ids in prompts],
        "ignore_eos": True,
        "logprobs": best,
        **terms,
    }


def places(text: str, tokens: Sequence[tuple[bytes, bool]]) -> list[int]:
    """Where each token of a text begins in it, in characters. Of a token its bytes, and whether it
    is special: then it may not stand in the text.

    A token that begins within a character begins where that does.
    """
    data = text.encode("utf-8", "surrogatepass")
    characters: list[int] = []  # of each byte
    for number, character in enumerate(text):
        characters += [number] * len(character.encode("utf-8", "surrogatepass"))
    characters.append(len(text))
    found = []
    place = 0
    for piece, special in tokens:
        found.append(characters[place])
        place = _behind(data, place, piece, special)
    return found


def _behind(data: bytes, place: int, piece: bytes, special: bool) -> int:
    """Where a token ends that begins at `place`. A tokenizer may write a space where there is none,
    or leave some out, and change letters.
    """
    near = data[place : place + len(piece) + NEAR]
    spaces = len(near) - len(near.lstrip())
    for start, form in ((0, piece), (0, piece.lstrip(b" ")), (spaces, piece.lstrip(b" "))):
        if form and near.startswith(form, start):
            return place + start + len(form)
    if special or not piece.strip():
        return place
    said = _folded(piece)
    ends = (end for end in range(1, len(near) + 1) if _folded(near[:end]) == said)
    return min(len(data), place + next(ends, len(piece)))


def _folded(data: bytes) -> str:
    """A text as normalizers may leave it: composed, in small letters."""
    text = data.decode("utf-8", "replace").strip()
    return unicodedata.normalize("NFKC", text).casefold()
