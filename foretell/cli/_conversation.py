"""A conversation with a chat model: its turns, and what of them the model still has room for.

It knows neither terminals nor files; `foretell chat` does. Every turn begins with the text of the
turns before it, whose cache rows the engine keeps, so that only what is new is computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretell.core.sampling_options import ANSWER_TOKENS
from foretell.errors import BadConfig, BadFile

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.api.outputs import Piece
    from foretell.core.stats import Stats

SCHEMA = "foretell.chat/1"
ROLES = ("user", "assistant")
KEPT = 0.75  # of what the context has for questions, where old turns have to go


@dataclass
class Turn:
    """A question, and what was said to it so far."""

    question: str
    answer: str = ""
    finish_reason: str | None = None  # None: it was interrupted
    stats: Stats | None = None  # of an answer that was not


@dataclass
class Chat:
    """A conversation. Turns are added by `ask`; `change` sets how answers are made."""

    lm: LM
    method: str = "auto"
    sampling: dict[str, Any] = field(default_factory=dict)  # arguments of LM.generate
    system: str = ""  # what the model is told before the conversation; empty: nothing
    turns: list[Turn] = field(default_factory=list)
    left_out: int = 0  # turns at the beginning that the model is not shown any more

    def change(self, method: str | None = None, **sampling: Any) -> None:
        """Sets the method, or arguments of LM.generate, for the turns to come.

        Raises what a question would raise with them, and then changes nothing.
        """
        spec = self.method if method is None else method
        options = self.sampling | sampling
        trial = [{"role": "user", "content": "?"}]
        self.lm.generate(trial, spec, **options | {"min_new_tokens": 0, "max_new_tokens": 0})
        self.method = spec
        self.sampling = options

    def tell(self, system: str) -> None:
        """Sets what the model is told before the conversation."""
        self.system = system
        self.left_out = 0

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """The pieces of an answer. However this ends, what was said by then is kept as a turn;
        where nothing was, the question is forgotten.
        """
        start = self._first_that_fits(question)
        messages = self._messages(start, question)
        turn = Turn(question)
        with closing(self.lm.stream(messages, self.method, **self.sampling)) as pieces:
            self.left_out = start  # the question was not refused
            try:
                for piece in pieces:
                    turn.answer += piece.text
                    turn.finish_reason = piece.finish_reason
                    turn.stats = piece.stats
                    yield piece
            finally:
                if turn.answer or turn.finish_reason is not None:
                    self.turns.append(turn)

    def retry(self) -> Generator[Piece, None, None]:
        """Answers the last question again, with the next seed. The old answer stays where there is
        no new one. Raises BadConfig where nothing was asked.
        """
        old_turn = self.undo()
        count = len(self.turns)
        self.sampling["seed"] = self.sampling.get("seed", 0) + 1
        try:
            yield from self.ask(old_turn.question)
        finally:
            if len(self.turns) == count:
                self.turns.append(old_turn)

    def undo(self) -> Turn:
        """Takes the last turn away, and returns it. Raises BadConfig where there is none."""
        if not self.turns:
            raise BadConfig("nothing has been said yet: ask something first")
        self.left_out = min(self.left_out, len(self.turns) - 1)
        return self.turns.pop()

    def clear(self) -> None:
        """Forgets all turns; what the model is told before them stays."""
        self.turns = []
        self.left_out = 0

    # --- what the model is shown

    def tokens(self) -> int:
        """Tokens of the conversation as the model would be shown it now."""
        if not self.system and not self.turns[self.left_out :]:
            return 0
        return len(self.lm.prompt_ids(self._messages(self.left_out)))

    def _messages(self, start: int, question: str | None = None) -> list[dict[str, str]]:
        """The turns from `start` on, after what the model is told and before the question."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[start:]:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        if question is not None:
            messages.append({"role": "user", "content": question})
        return messages

    def _first_that_fits(self, question: str) -> int:
        """The turn from which on the model is shown the conversation: the first one that leaves
        room for question and answer.
        """
        context = self.lm.models["target"].context
        answer = min(self.sampling.get("max_new_tokens", ANSWER_TOKENS), context // 2)
        room = context - answer

        def fits(start: int, tokens: float) -> bool:
            return len(self.lm.prompt_ids(self._messages(start, question))) <= tokens

        if fits(self.left_out, room):
            return self.left_out
        # More than it takes, so that the next questions come after the same text again, whose
        # cache rows are there.
        starts = range(len(self.turns))
        return bisect_left(starts, True, key=lambda start: fits(start, KEPT * room))

    # --- as a document

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "messages": self._messages(0)}

    def take(self, document: Any, place: str) -> None:
        """Goes on with the conversation of a document that `to_dict` made. `place`: where it is
        from. Raises BadFile where it is something else.
        """
        system, self.turns = read_conversation(document, place)
        self.tell(system)


def read_conversation(document: Any, place: str) -> tuple[str, list[Turn]]:
    """System text and turns of a saved chat. Raises BadFile."""
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
        raise BadFile(
            f"{place}: no saved chat (its schema is not {SCHEMA}); name one that /save wrote"
        )
    messages = document.get("messages")
    contents: list[tuple[str, str]] = []
    for message in messages if isinstance(messages, list) else [None]:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise BadFile(f"{place}: damaged: a message needs a role and a content")
        contents.append((str(message.get("role")), message["content"]))
    system = contents.pop(0)[1] if contents and contents[0][0] == "system" else ""
    if [role for role, _ in contents] != list(ROLES) * (len(contents) // 2):
        raise BadFile(f"{place}: damaged: every question (user) needs an answer (assistant)")
    turn_contents = [content for _, content in contents]
    turns = [Turn(*pair) for pair in zip(turn_contents[::2], turn_contents[1::2], strict=True)]
    return system, turns
