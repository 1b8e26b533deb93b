"""Texts of code in which a language server says which names may follow a dot: a Constraint.

What may follow a text is a function of the text and of the server's answers. Each question is
asked once, and its answer kept, so that it is the same for all branches and drafts of a request.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from threading import Lock, RLock
from typing import Any, NamedTuple

import torch

from foretell.constraints.language_server import LanguageServer
from foretell.constraints.members import DOT, NAME_BYTES, Code, find_member_dots
from foretell.constraints.stems import Stems
from foretell.core.constraint import Prompted
from foretell.ops.common_prefix import shared_prefix_length

AHEAD = 16  # questions that go along with one forward; others wait until they are met
STATES = 256  # of code, of which it is kept what they mean for tokens
_numbers = count(1)


class Documents:
    """A document of a server that shows one text after the other.

    `counts`: what became of the questions; `uri` is a file beside the real one, whose content the
    server then takes from here.
    """

    def __init__(self, server: LanguageServer, file: Path):
        self.server = server
        self.uri = file.with_name(f"{file.stem}_{next(_numbers)}.py").as_uri()
        self.counts: Counter[str] = Counter()
        self.answers: dict[bytes, frozenset[bytes]] = {}
        self.asking = Lock()
        weakref.finalize(self, server.unused.append, self.uri)

    def known_names(self, text: bytes) -> frozenset[bytes] | None:
        """The names that may follow a text; None: it was not asked about."""
        return self.answers.get(blake2b(text, digest_size=16).digest())

    def complete_names(self, text: bytes) -> frozenset[bytes]:
        """The names that may follow a text, asked for if they are not known; none where the
        server has no answer.
        """
        text_key = blake2b(text, digest_size=16).digest()
        with self.asking:
            if text_key not in self.answers:
                shown_text = text.decode("utf-8", "replace")
                found_names, outcome = self.server.complete_names(self.uri, shown_text)
                closing_brackets = (
                    find_member_dots(text)[0].brackets[::-1] if outcome == "empty" else b""
                )
                if closing_brackets:
                    found_names, outcome = self.server.complete_names(
                        self.uri, shown_text, closing_brackets.decode()
                    )
                self.counts[outcome] += 1
                self.answers[text_key] = frozenset(name.encode() for name in found_names)
            return self.answers[text_key]


class Vocabulary:
    """A vocabulary as a monitor needs it.

    `first`: tokens that begin with a dot and go on; `dotted_tokens`: those with a dot further
    inside, with more after it. `dotted_stems`: the stems of what follows the first dot,
    where there are letters of names among them; else None.
    """

    def __init__(self, pieces: Sequence[bytes | None]):
        self.pieces = [piece or b"" for piece in pieces]
        self.stems = Stems(pieces)
        has_dot = [b"." in piece[:-1] for piece in self.pieces]
        starts_dotted = [
            is_dotted and self.pieces[i][0] == DOT for i, is_dotted in enumerate(has_dot)
        ]
        self.first = torch.tensor(starts_dotted, dtype=torch.bool)
        self.dotted_tokens = [
            i for i, is_dotted in enumerate(has_dot) if is_dotted and b"." in self.pieces[i][1:-1]
        ]
        after_dots = [
            piece[1:] if starts_dotted[i] else None for i, piece in enumerate(self.pieces)
        ]
        has_letters = any(piece and piece[:1].isalpha() for piece in after_dots)
        self.dotted_stems = Stems(after_dots) if has_letters else None
        self._tokens_by_code: dict[Code, torch.Tensor] = {}

    def tokens_inside(self, code: Code) -> torch.Tensor:
        """The tokens (n,) that would go on after a dot of theirs that asks for a member after
        `code`, a dot at their beginning left aside.
        """
        inside_tokens = self._tokens_by_code.get(code.state_key)
        if inside_tokens is None:
            matching_tokens = []
            for token in self.dotted_tokens:
                last_index = len(self.pieces[token]) - 1
                dot_positions = find_member_dots(self.pieces[token], code)[1]
                if any(0 < position < last_index for position in dot_positions):
                    matching_tokens.append(token)
            inside_tokens = torch.tensor(matching_tokens, dtype=torch.long)
            if len(self._tokens_by_code) >= STATES:
                self._tokens_by_code.clear()
            self._tokens_by_code[code.state_key] = inside_tokens
        return inside_tokens


class Place(NamedTuple):
    """The state after a text. `length`: bytes of the text; `dot`: bytes up to the dot of the name
    that is being written, None: there is none; `typed`: what is written of the name.
    """

    code: Code = Code()
    length: int = 0
    dot: int | None = None
    typed: bytes = b""

    def advance(self, piece: bytes) -> Place:
        code, dot, typed = self.code, self.dot, self.typed
        for position, byte in enumerate(piece, 1):
            if dot is not None:
                dot, typed = (dot, typed + bytes([byte])) if byte in NAME_BYTES else (None, b"")
            code, asks_member = code.read_byte(byte)
            if asks_member:
                dot, typed = self.length + position, b""
        return Place(code, self.length + len(piece), dot, typed)


class Completing:
    """The constraint of code after `preceding`. The branches of a request share it."""

    asks = endless = True

    def __init__(self, documents: Documents, preceding: bytes, prompted: Prompted):
        self.documents = documents
        self.preceding = preceding
        self.start_place = Place().advance(preceding)
        token_words, vocab = prompted.words, prompted.vocab
        shared_key = "completing", token_words, vocab
        vocabulary = prompted.kept.get(shared_key)
        if vocabulary is None:
            pieces = [token_words.piece(token) for token in range(vocab)]
            vocabulary = prompted.kept[shared_key] = Vocabulary(pieces)
        self.vocabulary: Vocabulary = vocabulary

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.documents.counts)

    def track(self) -> Names:
        return Names(self)


class Names:
    """The place of one branch in its text; an AskingTracker. Threads may share it."""

    endless = True

    def __init__(self, config: Completing):
        self.vocabulary = config.vocabulary
        self.documents = config.documents
        self.path: list[int] = []
        self.checked_count = 0  # tokens of the path that are known to be allowed
        self.places = [config.start_place]  # after each token of the path, and before the first
        self.masks: list[torch.Tensor | None] = [None]  # of what may follow, once it was asked for
        self.text = bytearray(config.preceding)
        self.turn = RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Names:
        """Returns itself: what it answers is a function of the text alone."""
        return self

    # --- what the engine asks

    def permits(self, output: Sequence[int]) -> bool:
        with self.turn:
            self._rewind_to(output)
            self._truncate_path(self.checked_count)
            for token in output[len(self.path) :]:
                allowed_mask = self._current_mask()
                if not (token < len(allowed_mask) and allowed_mask[token]):
                    return False
                self._push_token(token)
                self.checked_count += 1
            return True

    def whole(self, output: Sequence[int]) -> bool:
        with self.turn:
            return self.permits(output) and self._may_end()

    def allowed(self, output: Sequence[int]) -> torch.Tensor:
        with self.turn:
            if not self.permits(output):
                return torch.zeros(len(self.vocabulary.pieces), dtype=torch.bool)
            return self._current_mask().clone()

    def forced(self, output: Sequence[int]) -> list[int]:
        return []

    def unknown(self, outputs: Sequence[Sequence[int]]) -> Callable[[], None] | None:
        missing_texts: dict[bytes, None] = {}
        with self.turn:
            for output in outputs:
                self._rewind_to(output)
                for token in output[len(self.path) :]:
                    self._push_token(token)
                missing_texts |= dict.fromkeys(self._missing_texts())
        asked_texts = list(missing_texts)[:AHEAD]
        return partial(_ask_names, self.documents, asked_texts) if asked_texts else None

    def knows(self, output: Sequence[int]) -> bool:
        with self.turn:
            self._rewind_to(output)
            self._truncate_path(self.checked_count)
            for token in output[len(self.path) :]:
                if self._missing_texts():
                    return False
                self._push_token(token)
            return True

    # --- the path

    def _rewind_to(self, output: Sequence[int]) -> None:
        """Goes back to where the path and this output part."""
        self._truncate_path(shared_prefix_length(self.path, list(output)))

    def _truncate_path(self, length: int) -> None:
        if length < len(self.path):
            del self.path[length:], self.places[length + 1 :], self.masks[length + 1 :]
            del self.text[self.places[-1].length :]
            self.checked_count = min(self.checked_count, length)

    def _push_token(self, token: int) -> None:
        token_bytes = self.vocabulary.pieces[token]
        self.path.append(token)
        self.places.append(self.places[-1].advance(token_bytes))
        self.masks.append(None)
        self.text += token_bytes

    # --- what may follow it

    def _current_mask(self) -> torch.Tensor:
        current_mask = self.masks[-1]
        if current_mask is None:
            current_mask = self.masks[-1] = self._build_mask()
        return current_mask

    def _build_mask(self) -> torch.Tensor:
        vocabulary = self.vocabulary
        allowed_mask = self._name_tokens()
        if allowed_mask is None:
            allowed_mask = torch.ones(len(vocabulary.pieces), dtype=torch.bool)
        code = self.places[-1].code
        if code.read_byte(DOT)[1]:
            joined_tokens = None
            if vocabulary.dotted_stems is not None and bool(
                (allowed_mask & vocabulary.first).any()
            ):
                member_names = self.documents.complete_names(bytes(self.text) + b".")
                joined_tokens = vocabulary.dotted_stems.tokens_after(
                    member_names, b"", vocabulary.stems
                )
                if joined_tokens is None:
                    joined_tokens = vocabulary.first
            allowed_mask &= (
                ~vocabulary.first if joined_tokens is None else ~vocabulary.first | joined_tokens
            )
        allowed_mask[vocabulary.tokens_inside(code)] = False
        return allowed_mask

    def _name_tokens(self) -> torch.Tensor | None:
        """The tokens that go on the name that is being written; None: any token may follow."""
        dot, typed = self.places[-1].dot, self.places[-1].typed
        if dot is None:
            return None
        return self.vocabulary.stems.tokens_after(
            self.documents.complete_names(bytes(self.text[:dot])), typed
        )

    def _may_end(self) -> bool:
        """Whether the text may end here, which it may not within a name."""
        dot, typed = self.places[-1].dot, self.places[-1].typed
        if dot is None or self._name_tokens() is None:
            return True
        return typed in self.documents.complete_names(bytes(self.text[:dot]))

    def _missing_texts(self) -> list[bytes]:
        """The texts that have to be asked about to know which tokens may follow."""
        place = self.places[-1]
        known_names = self.documents.known_names
        needed_texts = [] if place.dot is None else [bytes(self.text[: place.dot])]
        if self.vocabulary.dotted_stems is not None and place.code.read_byte(DOT)[1]:
            member_names = known_names(needed_texts[0]) if needed_texts else None
            if not member_names or place.typed in member_names:
                needed_texts.append(bytes(self.text) + b".")
        return [text for text in needed_texts if known_names(text) is None]


def _ask_names(documents: Documents, asked_texts: Sequence[bytes]) -> None:
    for text in asked_texts:
        documents.complete_names(text)
