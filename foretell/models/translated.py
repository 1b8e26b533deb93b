"""A request's text in the tokens of another model, on a branch of its own.

The branch holds all but the last tokens of that text. How these are divided may change with what
follows, so they are asked about as the first nodes of every tree, which are no one's for good.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tokenizer_bytes import continue_tokens, whole_characters, words_of
from foretell.core.tree import TokenTree
from foretell.core.types import Commit, Message, Open

if TYPE_CHECKING:
    from foretell.core.context import Context

WINDOW = 10  # tokens that are divided anew with what follows them


class Translated:
    """A request's text in the tokens of another model. `target_words` are the target's words,
    `model_words` the other model's; `token_ids` the text in their tokens, and `pending_bytes` its
    last bytes, which these lack: a character that is not whole.

    Raises Unsupported where a tokenizer is not known.
    """

    def __init__(self, ctx: Context, name: str = "draft", window: int = WINDOW):
        self.name = name
        self.window = window
        self.model = ctx.models[name]
        self.target_words = words_of(ctx.models["target"], ctx.request.name)
        self.model_words = words_of(self.model, ctx.request.name)
        self.end_token = ctx.engine.eos[0] if ctx.engine.eos else self.target_words.end
        self.read_count = 0  # tokens of the request's text that were taken in
        self.token_ids = list(self.model_words.start)
        self.fixed_count = len(self.token_ids)  # of them, those that are not divided anew
        self.pending_bytes = b""
        self.branch = -1  # not opened yet
        self.branch_length = 0  # of `token_ids`, those that are the branch's tokens

    # --- the text

    def read_text(self, tokens: Sequence[int]) -> None:
        """Takes in what the request's text has become."""
        text_bytes = self.pending_bytes
        for position in range(self.read_count, len(tokens)):
            token = tokens[position]
            token_bytes = self.target_words.piece(token)
            if token_bytes is None:
                special_ids = self._special_tokens(token, position)
                if special_ids is None:
                    token_bytes = self.target_words.names.get(token, "").encode()
                else:
                    self._encode_bytes(text_bytes)
                    text_bytes = b""
                    self.token_ids += special_ids
                    self.fixed_count = len(self.token_ids)
                    continue
            text_bytes += token_bytes
        self.read_count = len(tokens)
        whole_end = whole_characters(text_bytes)
        self._encode_bytes(text_bytes[:whole_end])
        self.pending_bytes = text_bytes[whole_end:]

    def _special_tokens(self, token: int, position: int) -> list[int] | None:
        """Their tokens for a special one of ours; None: they spell its name."""
        token_name = self.target_words.names.get(token, "")
        if position == 0 and (token in self.target_words.start or token == self.end_token):
            return []  # where a text begins, which they say in their own way
        if token_name in self.model_words.specials:
            return [self.model_words.specials[token_name]]
        if token == self.end_token and self.model_words.end is not None:
            return [self.model_words.end]
        return None

    def bytes_of(self, token: int, position: int) -> int:
        """The number of bytes of the text that this token of ours is, at this position."""
        token_bytes = self.target_words.piece(token)
        if token_bytes is not None:
            return len(token_bytes)
        spelled_out = self._special_tokens(token, position) is None
        return len(self.target_words.names.get(token, "").encode()) if spelled_out else 0

    def _encode_bytes(self, text_bytes: bytes) -> None:
        if not text_bytes:
            return
        first_redone = max(self.fixed_count, self.branch_length, len(self.token_ids) - self.window)
        tail_bytes = self.model_words.text(self.token_ids[first_redone:])
        self.token_ids[first_redone:] = self.model_words.encode(tail_bytes + text_bytes)

    # --- the branch

    def max_drafts(self, ctx: Context) -> int:
        """The number of their tokens that may be drafted; 0: none."""
        if not self.token_ids or ctx.depth < 1:
            return 0
        return max(0, self.model.context - len(self.token_ids) - 1)

    def open_tree(self) -> Generator[Message, Any, tuple[TokenTree, int]]:
        """Brings the branch up to the text; returns the tree of its last tokens, and the last
        one's node. There must be a token, and room.
        """
        settled_count = len(self.token_ids) - self.window
        if self.branch < 0:
            self.branch_length = max(1, settled_count)
            self.branch = yield Open(self.token_ids[: self.branch_length], self.name)
        elif settled_count > self.branch_length + self.window:
            settled_ids = self.token_ids[self.branch_length : settled_count]
            yield Commit(settled_ids, torch.empty(0), self.branch)
            self.branch_length = settled_count
        tree = TokenTree(self.token_ids[self.branch_length - 1]).chain(
            self.token_ids[self.branch_length :]
        )
        return tree, len(tree) - 1

    # --- back into our tokens

    def translate_back(self, tokens: Sequence[int], drafted_tokens: Sequence[int]) -> list[int]:
        """Translates tokens of theirs, drafted after `token_ids`, into ours after `tokens`.

        A character that is not whole yet is left out, and what follows a special token that we do
        not have.
        """
        text_bytes = b""
        end_tokens: list[int] = []
        for token in drafted_tokens:
            token_bytes = self.model_words.piece(token)
            if token_bytes is None:
                token_name = self.model_words.names.get(token, "")
                if token_name in self.target_words.specials:
                    end_tokens = [self.target_words.specials[token_name]]
                elif token == self.model_words.end and self.end_token is not None:
                    end_tokens = [self.end_token]
                break
            text_bytes += token_bytes
        if not text_bytes.startswith(self.pending_bytes):
            return []
        whole_end = whole_characters(text_bytes)
        if whole_end < len(text_bytes):
            end_tokens = []
        added_bytes = text_bytes[len(self.pending_bytes) : whole_end]
        if not added_bytes:
            return end_tokens
        return continue_tokens(self.target_words, tokens, added_bytes, self.window) + end_tokens
