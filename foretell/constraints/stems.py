"""A vocabulary by the beginnings of names: which tokens write a name, and which one and its end.

Two tokens may write the same bytes; both are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from foretell.constraints.members import NAME_BYTES


class Stems:
    """`pieces`: of each token its bytes, None: it has none.

    `breaks` (V,): the tokens that begin with a byte that cannot go on a name.
    """

    def __init__(self, pieces: Sequence[bytes | None]):
        self.vocab = len(pieces)
        self.whole: dict[bytes, list[int]] = {}  # tokens that are these bytes of a name
        self.broken: dict[bytes, list[int]] = {}  # that are these, and a break and more
        self.breaks = torch.zeros(self.vocab, dtype=torch.bool)
        self.longest = 0
        for token, piece in enumerate(pieces):
            if not piece:
                continue
            size = next((i for i, byte in enumerate(piece) if byte not in NAME_BYTES), len(piece))
            if size == len(piece):
                self.whole.setdefault(piece, []).append(token)
            elif size:
                self.broken.setdefault(piece[:size], []).append(token)
            else:
                self.breaks[token] = True
            self.longest = max(self.longest, size)
        self.letters = {piece[0] for piece in self.whole if len(piece) == 1}

    def writes(self, rest: bytes) -> list[bool]:
        """Of each place in the rest of a name whether tokens can go on from there to its end."""
        if self.letters.issuperset(rest):
            return [True] * (len(rest) + 1)
        can = [False] * len(rest) + [True]
        for start in range(len(rest) - 1, -1, -1):
            can[start] = rest[start:] in self.broken or any(
                can[end] and rest[start:end] in self.whole
                for end in range(start + 1, min(len(rest), start + self.longest) + 1)
            )
        return can

    def following(
        self, names: Iterable[bytes], typed: bytes, later: Stems | None = None
    ) -> torch.Tensor | None:
        """Bool (V,): the tokens that go on one of the names, of which `typed` is written, or that
        end it by a break; None where no name can be written to its end.

        `later`: what all tokens but the next are of, and by which it is told what can be written.
        """
        found: list[int] = []
        ends = possible = False
        for name in names:
            if not name.startswith(typed):
                continue
            rest = name[len(typed) :]
            can = (later or self).writes(rest)
            if not can[0]:
                continue
            possible = True
            if not rest:
                ends = True
                continue
            found += self.broken.get(rest, ())
            for end in range(1, min(len(rest), self.longest) + 1):
                if can[end]:
                    found += self.whole.get(rest[:end], ())
        if not possible:
            return None
        mask = self.breaks.clone() if ends else torch.zeros(self.vocab, dtype=torch.bool)
        mask[torch.tensor(found, dtype=torch.long)] = True
        return mask
