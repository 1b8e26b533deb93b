"""Texts of code in which a language server says which names may stand behind a dot: a Constraint.

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
from foretell.constraints.members import DOT, NAME_BYTES, Code, read
from foretell.constraints.stems import Stems
from foretell.core.constraint import Prompted
from foretell.ops.common_prefix import common

AHEAD = 16  # questions that go along with one forward; others wait until they are met
STATES = 256  # of code, of which it is kept what they mean for tokens
_numbers = count(1)


class Documents:
    """A document of a server that shows one text after the other.

    `counts`: what became of the questions; `uri` is a file beside the real one, whose content the
    server then has as it is.
    """

    def __init__(self, server: LanguageServer, file: Path):
        self.server = server
        self.uri = file.with_name(f"{file.stem}_{next(_numbers)}.py").as_uri()
        self.counts: Counter[str] = Counter()
        self.answers: dict[bytes, frozenset[bytes]] = {}
        self.asking = Lock()
        weakref.finalize(self, server.unused.append, self.uri)

    def known(self, text: bytes) -> frozenset[bytes] | None:
        """The names behind a text; None: it was not asked about."""
        return self.answers.get(blake2b(text, digest_size=16).digest())

    def names(self, text: bytes) -> frozenset[bytes]:
        """The same, asked about if it was not; none where there is no answer."""
        key = blake2b(text, digest_size=16).digest()
        with self.asking:
            if key not in self.answers:
                shown = text.decode("utf-8", "replace")
                found, what = self.server.names(self.uri, shown)
                closing = read(text)[0].brackets[::-1] if what == "empty" else b""
                if closing:
                    found, what = self.server.names(self.uri, shown, closing.decode())
                self.counts[what] += 1
                self.answers[key] = frozenset(name.encode() for name in found)
            return self.answers[key]


class Vocabulary:
    """What a monitor has to know of a vocabulary.

    `first`: tokens that begin with a dot and go on; `inner`: those with a dot further inside, with
    more behind it. `joined`: the stems of what stands behind the first dot, where there are letters
    of names among them; else None.
    """

    def __init__(self, pieces: Sequence[bytes | None]):
        self.pieces = [piece or b"" for piece in pieces]
        self.stems = Stems(pieces)
        dotted = [b"." in piece[:-1] for piece in self.pieces]
        starts = [found and self.pieces[i][0] == DOT for i, found in enumerate(dotted)]
        self.first = torch.tensor(starts, dtype=torch.bool)
        self.inner = [i for i, found in enumerate(dotted) if found and b"." in self.pieces[i][1:-1]]
        behind = [piece[1:] if starts[i] else None for i, piece in enumerate(self.pieces)]
        letters = any(piece and piece[:1].isalpha() for piece in behind)
        self.joined = Stems(behind) if letters else None
        self._inside: dict[Code, torch.Tensor] = {}

    def inside(self, code: Code) -> torch.Tensor:
        """The tokens (n,) that would go on behind a dot of theirs that asks for a member behind
        `code`, a dot at their beginning left aside.
        """
        found = self._inside.get(code.key)
        if found is None:
            tokens = []
            for token in self.inner:
                last = len(self.pieces[token]) - 1
                dots = read(self.pieces[token], code)[1]
                if any(0 < place < last for place in dots):
                    tokens.append(token)
            found = torch.tensor(tokens, dtype=torch.long)
            if len(self._inside) >= STATES:
                self._inside.clear()
            self._inside[code.key] = found
        return found


class Place(NamedTuple):
    """Behind a text. `length`: its bytes; `dot`: those up to the dot of the name that is being
    written, None: there is none; `typed`: what of the name stands there.
    """

    code: Code = Code()
    length: int = 0
    dot: int | None = None
    typed: bytes = b""

    def behind(self, piece: bytes) -> Place:
        code, dot, typed = self.code, self.dot, self.typed
        for place, byte in enumerate(piece, 1):
            if dot is not None:
                dot, typed = (dot, typed + bytes([byte])) if byte in NAME_BYTES else (None, b"")
            code, asks = code.read(byte)
            if asks:
                dot, typed = self.length + place, b""
        return Place(code, self.length + len(piece), dot, typed)


class Completing:
    """A Constraint: code behind `before`. The branches of a request share it."""

    asks = endless = True

    def __init__(self, documents: Documents, before: bytes, prompted: Prompted):
        self.documents = documents
        self.before = before
        self.start = Place().behind(before)
        words, vocab = prompted.words, prompted.vocab
        key = "completing", words, vocab
        known = prompted.kept.get(key)
        if known is None:
            pieces = [words.piece(token) for token in range(vocab)]
            known = prompted.kept[key] = Vocabulary(pieces)
        self.vocabulary: Vocabulary = known

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.documents.counts)

    def track(self) -> Names:
        return Names(self)


class Names:
    """One branch's place in its text; an AskingTracker. Threads may share it."""

    endless = True

    def __init__(self, config: Completing):
        self.vocabulary = config.vocabulary
        self.documents = config.documents
        self.path: list[int] = []
        self.checked = 0  # tokens of the path that are known to be allowed
        self.places = [config.start]  # behind each token of the path, and before the first
        self.masks: list[torch.Tensor | None] = [None]  # of what may follow, once it was asked for
        self.text = bytearray(config.before)
        self.turn = RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Names:
        """Itself: what it answers is a function of the text alone."""
        return self

    # --- what the engine asks

    def permits(self, output: Sequence[int]) -> bool:
        with self.turn:
            self._back(output)
            self._cut(self.checked)
            for token in output[len(self.path) :]:
                mask = self._mask()
                if not (token < len(mask) and mask[token]):
                    return False
                self._push(token)
                self.checked += 1
            return True

    def whole(self, output: Sequence[int]) -> bool:
        with self.turn:
            return self.permits(output) and self._ends()

    def allowed(self, output: Sequence[int]) -> torch.Tensor:
        with self.turn:
            if not self.permits(output):
                return torch.zeros(len(self.vocabulary.pieces), dtype=torch.bool)
            return self._mask().clone()

    def forced(self, output: Sequence[int]) -> list[int]:
        return []

    def unknown(self, outputs: Sequence[Sequence[int]]) -> Callable[[], None] | None:
        lacking: dict[bytes, None] = {}
        with self.turn:
            for output in outputs:
                self._back(output)
                for token in output[len(self.path) :]:
                    self._push(token)
                lacking |= dict.fromkeys(self._lacking())
        texts = list(lacking)[:AHEAD]
        return partial(_ask, self.documents, texts) if texts else None

    def knows(self, output: Sequence[int]) -> bool:
        with self.turn:
            self._back(output)
            self._cut(self.checked)
            for token in output[len(self.path) :]:
                if self._lacking():
                    return False
                self._push(token)
            return True

    # --- the path

    def _back(self, output: Sequence[int]) -> None:
        """Back to where the path and this output part."""
        self._cut(common(self.path, list(output)))

    def _cut(self, length: int) -> None:
        if length < len(self.path):
            del self.path[length:], self.places[length + 1 :], self.masks[length + 1 :]
            del self.text[self.places[-1].length :]
            self.checked = min(self.checked, length)

    def _push(self, token: int) -> None:
        piece = self.vocabulary.pieces[token]
        self.path.append(token)
        self.places.append(self.places[-1].behind(piece))
        self.masks.append(None)
        self.text += piece

    # --- what may follow it

    def _mask(self) -> torch.Tensor:
        mask = self.masks[-1]
        if mask is None:
            mask = self.masks[-1] = self._following()
        return mask

    def _following(self) -> torch.Tensor:
        vocabulary = self.vocabulary
        mask = self._of_name()
        if mask is None:
            mask = torch.ones(len(vocabulary.pieces), dtype=torch.bool)
        code = self.places[-1].code
        if code.read(DOT)[1]:
            behind = None
            if vocabulary.joined is not None and bool((mask & vocabulary.first).any()):
                names = self.documents.names(bytes(self.text) + b".")
                behind = vocabulary.joined.following(names, b"", vocabulary.stems)
                if behind is None:
                    behind = vocabulary.first
            mask &= ~vocabulary.first if behind is None else ~vocabulary.first | behind
        mask[vocabulary.inside(code)] = False
        return mask

    def _of_name(self) -> torch.Tensor | None:
        """The tokens that go on the name that is being written; None: it is free, or none is."""
        dot, typed = self.places[-1].dot, self.places[-1].typed
        if dot is None:
            return None
        return self.vocabulary.stems.following(self.documents.names(bytes(self.text[:dot])), typed)

    def _ends(self) -> bool:
        """Whether the text may end here: not within a name."""
        dot, typed = self.places[-1].dot, self.places[-1].typed
        if dot is None or self._of_name() is None:
            return True
        return typed in self.documents.names(bytes(self.text[:dot]))

    def _lacking(self) -> list[bytes]:
        """The texts that have to be asked about to know what may follow."""
        place = self.places[-1]
        known = self.documents.known
        texts = [] if place.dot is None else [bytes(self.text[: place.dot])]
        if self.vocabulary.joined is not None and place.code.read(DOT)[1]:
            names = known(texts[0]) if texts else None
            if not names or place.typed in names:
                texts.append(bytes(self.text) + b".")
        return [text for text in texts if known(text) is None]


def _ask(documents: Documents, texts: Sequence[bytes]) -> None:
    for text in texts:
        documents.names(text)
