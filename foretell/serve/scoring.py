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
    """Generates these tokens, whatever the target would say."""

    tokens: tuple[int, ...]

    def run(self, ctx: Context) -> Steps:
        said_count = 0
        while True:
            tokens = list(self.tokens[said_count : said_count + CHUNK])
            tree = TokenTree(ctx.tokens[-1]).chain(tokens[:-1])
            reply: Reply = yield Ask(tree, branch=ctx.branch)
            committed: Kept = yield Commit(
                tokens, reply.logits, ctx.branch, ["target"] * len(tokens)
            )
            said_count += len(committed.tokens)
            if committed.reason:
                return


def scoring_call(
    prompts: Sequence[Sequence[int]], best_count: int, **request_terms: Any
) -> dict[str, Any]:
    """Arguments of `LM.generate` or `agenerate` by which the `logprobs` of the outputs are those of
    each prompt from its second token on. `request_terms`: tenant, priority, timeout.
    """
    return {
        "prompt": [[ids[0]] for ids in prompts],
        "method": [Given(tuple(ids[1:])) for ids in prompts],
        "max_new_tokens": [len(ids) - 1 for ids in prompts],
        "ignore_eos": True,
        "logprobs": best_count,
        **request_terms,
    }


def token_offsets(text: str, tokens: Sequence[tuple[bytes, bool]]) -> list[int]:
    """Finds where each token of a text begins in it, in characters.

    `tokens`: the bytes of each, and whether it is special: then it may not stand in the text. A
    token that begins within a character begins where that does.
    """
    text_bytes = text.encode("utf-8", "surrogatepass")
    character_indices: list[int] = []  # of each byte
    for character_index, character in enumerate(text):
        character_indices += [character_index] * len(character.encode("utf-8", "surrogatepass"))
    character_indices.append(len(text))
    token_starts = []
    byte_position = 0
    for piece, is_special in tokens:
        token_starts.append(character_indices[byte_position])
        byte_position = _find_token_end(text_bytes, byte_position, piece, is_special)
    return token_starts


def _find_token_end(text_bytes: bytes, start_position: int, piece: bytes, is_special: bool) -> int:
    """Finds where a token ends that begins at `start_position`. A tokenizer may write a space where
    there is none, or leave some out, and change letters.
    """
    nearby_bytes = text_bytes[start_position : start_position + len(piece) + NEAR]
    space_count = len(nearby_bytes) - len(nearby_bytes.lstrip())
    for start, token_form in (
        (0, piece),
        (0, piece.lstrip(b" ")),
        (space_count, piece.lstrip(b" ")),
    ):
        if token_form and nearby_bytes.startswith(token_form, start):
            return start_position + start + len(token_form)
    if is_special or not piece.strip():
        return start_position
    folded_piece = _fold_case(piece)
    matching_ends = (
        end
        for end in range(1, len(nearby_bytes) + 1)
        if _fold_case(nearby_bytes[:end]) == folded_piece
    )
    return min(len(text_bytes), start_position + next(matching_ends, len(piece)))


def _fold_case(data: bytes) -> str:
    """Returns a text as normalizers may leave it: composed, in small letters."""
    text = data.decode("utf-8", "replace").strip()
    return unicodedata.normalize("NFKC", text).casefold()
