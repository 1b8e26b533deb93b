"""A text that is edited while its rows are kept: `LM.editor`.

After an edit only the tokens that were replaced are computed, over the text before them. What
follows them keeps its rows; their keys are turned to their new positions, so every position
is right. What a recomputed text would have is another thing: the rows after an edit still tell of
the text as it was when they were computed.

Paper: He et al., Let the Code LLM Edit Itself When You Edit the Code, arXiv:2407.03157
Guarantee: lossy: rows after an edit are those of the text before it; nothing is lost where
nothing follows it
Cost: the replaced tokens, once, and a turn of the keys after them
Needs: rotary positions
Differs:
- any number of edits follow each other, each can be taken back, and keys are always turned from
  where they were computed
- the edited text is tokenised anew as a whole: its tokens are those of `LM.encode`, and tokens that
  an edit cuts, or changes beside it, widen the edit
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foretell.cache.edited import Edited, Move, part_of
from foretell.cache.prefix_tree import common_length
from foretell.cache.states import TappedStates
from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.engine.checks import models_for
from foretell.errors import BadConfig, PromptTooLong, Unsupported

if TYPE_CHECKING:
    from foretell.api.outputs import Output, Piece
    from foretell.cache.policy import Segment
    from foretell.core.model import Model
    from foretell.engine.driver import Driver
    from foretell.engine.engine import Engine

CHUNK = 512  # tokens that one forward takes in


class Host(Protocol):
    """The part of an api.LM that an editor uses."""

    models: dict[str, Model]
    engine: Engine
    driver: Driver

    def encode(self, text: str) -> list[int]: ...

    def resolve(self, method: Any) -> tuple[str, Any]: ...

    def generate(self, prompt: Any, method: Any, **sampling: Any) -> Any: ...

    def stream(self, prompt: Any, method: Any, **sampling: Any) -> Generator[Piece, None, None]: ...


@dataclass(frozen=True)
class Edit:
    """Numbers of an edit: what it did to the tokens of a text."""

    start: int  # tokens before it, whose rows stay
    stop: int  # end of the tokens that it replaced
    computed: int  # tokens in their place
    kept: int  # tokens after it, whose rows are kept

    @property
    def saved(self) -> float:
        """The share of the text's tokens that were not computed."""
        return (self.start + self.kept) / max(1, self.start + self.computed + self.kept)


@dataclass(frozen=True)
class _Undo:
    """Text and rows that take an edit back."""

    text: str
    start: int
    stop: int  # in the tokens of today
    removed: Edited


class Editor:
    """A text with its rows. Threads take turns; completions that run are not touched by edits.

    `segment`: the rows of all its tokens, their keys where the tokens stand now.
    """

    def __init__(self, lm: Host, text: str, method: Any = "auto"):
        """Reads the text. `method` is the one that completes it.

        Raises Unsupported, BadConfig or PromptTooLong.
        """
        self.lm = lm
        self.method = method
        self.text = text
        self._undos: list[_Undo] = []
        token_ids = self._text_ids(text)
        with lm.driver.exclusive(), torch.inference_mode():
            self._move = self._key_move()
            self._taps = self._kept_taps(token_ids)
            self._show_rows(Edited.from_segment(self._compute_rows(token_ids, None)))

    @property
    def tokens(self) -> list[int]:
        """Tokens of the text, as `LM.encode` gives them."""
        return list(self._rows.tokens)

    @property
    def bytes(self) -> int:
        """Bytes of the rows that it holds, those that `undo` needs included."""
        held_rows = [self._rows, *(holder.removed for holder in self._undos)]
        parts = [
            part for holder in held_rows for part in (*holder.k, *holder.v, *holder.states.values())
        ]
        if self.segment.k is not self._rows.k:
            parts += self.segment.k
        return sum(part.numel() * part.element_size() for part in parts)

    # --- what a user does

    def edit(self, start: int, stop: int, new: str) -> Edit:
        """Puts `new` in the place of text[start:stop], and computes the tokens that are new.

        Raises BadConfig for places outside the text, PromptTooLong where it becomes too long; then
        nothing has changed.
        """
        with self.lm.driver.exclusive(), torch.inference_mode():
            length = len(self.text)
            are_whole = type(start) is int and type(stop) is int
            if not are_whole or not 0 <= start <= stop <= length:
                raise BadConfig(
                    f"edit {start!r} to {stop!r}: the text has {length} characters; give two "
                    f"places from 0 to {length}, the first one first"
                )
            if not isinstance(new, str):
                raise BadConfig.field("new", new, "a text")
            text = self.text[:start] + new + self.text[stop:]
            return self._replace_tokens(text, self._text_ids(text))

    def undo(self) -> None:
        """Takes back the last edit that was not taken back: text, tokens, every bit of the rows.

        Raises BadConfig where there is none.
        """
        with self.lm.driver.exclusive(), torch.inference_mode():
            if not self._undos:
                raise BadConfig("undo: there is no edit to take back; edit the text first")
            last_undo = self._undos[-1]
            self._show_rows(
                self._rows.replace_tokens(last_undo.start, last_undo.stop, last_undo.removed)
            )
            self.text = last_undo.text
            self._undos.pop()

    def complete(self, **options: Any) -> Output:
        """Generates what the model writes after the text.

        Options are those of `LM.generate`, except `method`, which the editor has, and `kv`.
        """
        output: Output = self.lm.generate(**self._call_options(options))
        return output

    def stream(self, **options: Any) -> Generator[Piece, None, None]:
        """`complete` in pieces, as `LM.stream` gives them."""
        return self.lm.stream(**self._call_options(options))

    # --- rows

    def _replace_tokens(self, text: str, token_ids: Sequence[int]) -> Edit:
        """Makes these the tokens, and keeps the rows of the first and the last that stay.

        Of tokens that could be either, the first keep theirs: those rows are exact.
        """
        old_tokens = self._rows.tokens
        start = common_length(old_tokens, token_ids)
        kept_count = common_length(old_tokens[start:][::-1], token_ids[start:][::-1])
        stop, end = len(old_tokens) - kept_count, len(token_ids) - kept_count
        fresh_rows = self._rows.copy_part(start, start)
        if end > start:
            prefix = part_of(self.segment, 0, start) if start else None
            fresh_rows = Edited.from_segment(self._compute_rows(token_ids[:end], prefix))
        undo = _Undo(self.text, start, end, self._rows.copy_part(start, stop))
        self._show_rows(self._rows.replace_tokens(start, stop, fresh_rows))
        self.text = text
        self._undos.append(undo)
        return Edit(start, stop, end - start, kept_count)

    def _compute_rows(self, tokens: Sequence[int], prefix: Segment | None) -> Segment:
        """The rows of these tokens after those of `prefix`."""
        target = self.lm.models["target"]
        cache = target.cache()
        if self._taps:
            cache.states = TappedStates(self._taps)
        if prefix is not None and target.reads_segments:
            cache.adopt_segment(prefix)
        elif prefix is not None:
            cache.copy_segments([prefix])
        start = cache.length
        ask = Ask(TokenTree(tokens[-1]), rows=())
        is_complete = False
        while not is_complete:
            job, is_complete = cache.prepare(ask, tokens, CHUNK)
            target.forward([job])
        # A cache keeps all but the newest token, so another one follows them.
        computed = cache.share_rows([*tokens, 0])
        cache.drop()
        return part_of(computed, start, len(tokens))

    def _show_rows(self, rows: Edited) -> None:
        """Makes these the rows from now on."""
        segment = rows.to_segment(self._move)
        self._rows, self.segment = rows, segment

    # --- what it needs

    def _text_ids(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise BadConfig.field("text", text, "a text")
        token_ids = self.lm.encode(text)
        target = self.lm.models["target"]
        if len(token_ids) >= target.context:
            raise PromptTooLong(
                f"the text has {len(token_ids)} tokens and {target.name} holds {target.context}; "
                "shorten it"
            )
        return token_ids

    def _key_move(self) -> Move:
        """How the target's keys are moved. Raises Unsupported."""
        target: Any = self.lm.models["target"]
        moving = getattr(target, "find_move", None)
        cache = target.cache()
        if moving is None or not cache.sharable or None in cache.layout:
            raise Unsupported.missing_capability(
                "editor", target.name, "rotary positions and rows of every layer", "use generate"
            )
        if cache.layout != tuple(target.layout):
            need = "ordinary cache rows"
            raise Unsupported.missing_capability(
                "editor", target.name, need, "leave exact_bits out"
            )
        move: Move = moving("editor")
        return move

    def _kept_taps(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The hidden states of the text that the method reads."""
        strategy = self.lm.resolve(self.method)[1]
        request = Request(token_ids, strategy)
        engine = self.lm.engine
        return Context(engine, request, models_for(engine, request)).kept_taps

    def _call_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call of the LM."""
        if "method" in options:
            raise BadConfig("method: an editor completes by its own; give it to `lm.editor`")
        segment = self.segment
        known_length = len(segment.tokens) - 1
        prefix = part_of(segment, 0, known_length) if known_length else None
        tokens = list(segment.tokens)
        return {**options, "prompt": tokens, "method": self.method, "prefix": prefix}
