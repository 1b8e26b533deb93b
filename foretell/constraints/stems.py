"""A vocabulary by the beginnings of names: which tokens write a name, and which one and its end.

Two tokens may write the same bytes; both are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from foretell.constraints.members import NAME_BYTES


class Stems:
    """A vocabulary by the beginnings of names. `pieces`: the bytes of each token, None: it has
    none.

    `breaks` (V,): the tokens that begin with a byte that cannot go on a name.
    """

    def __init__(self, pieces: Sequence[bytes | None]):
        self.vocab = len(pieces)
        self.whole: dict[bytes, list[int]] = {}  # tokens that are these bytes of a name
        self.broken: dict[bytes, list[int]] = {}  # that are these, and a break and more
        self.breaks = torch.zeros(self.vocab, dtype=torch.bool)
        self.longest = 0
        for token, token_bytes in enumerate(pieces):
            if not token_bytes:
                continue
            name_length = next(
                (position for position, byte in enumerate(token_bytes) if byte not in NAME_BYTES),
                len(token_bytes),
            )
            if name_length == len(token_bytes):
                self.whole.setdefault(token_bytes, []).append(token)
            elif name_length:
                self.broken.setdefault(token_bytes[:name_length], []).append(token)
            else:
                self.breaks[token] = True
            self.longest = max(self.longest, name_length)
        self.letters = {token_bytes[0] for token_bytes in self.whole if len(token_bytes) == 1}

    def can_complete(self, remaining_name: bytes) -> list[bool]:
        """Whether tokens can go on to a name's end, from each position in the rest of the name."""
        if self.letters.issuperset(remaining_name):
            return [True] * (len(remaining_name) + 1)
        completable = [False] * len(remaining_name) + [True]
        for start_index in range(len(remaining_name) - 1, -1, -1):
            completable[start_index] = remaining_name[start_index:] in self.broken or any(
                completable[end_index] and remaining_name[start_index:end_index] in self.whole
                for end_index in range(
                    start_index + 1, min(len(remaining_name), start_index + self.longest) + 1
                )
            )
        return completable

    def tokens_after(
        self, names: Iterable[bytes], typed: bytes, later_stems: Stems | None = None
    ) -> torch.Tensor | None:
        """Bool (V,): the tokens that go on one of the names, of which `typed` is written, or that
        end it by a break; None where no name can be written to its end.

        `later_stems`: the stems of all tokens but the next, which decide what can be written.
        """
        found_tokens: list[int] = []
        may_end = any_possible = False
        for name in names:
            if not name.startswith(typed):
                continue
            remaining_name = name[len(typed) :]
            completable = (later_stems or self).can_complete(remaining_name)
            if not completable[0]:
                continue
            any_possible = True
            if not remaining_name:
                may_end = True
                continue
            found_tokens += self.broken.get(remaining_name, ())
            for end_index in range(1, min(len(remaining_name), self.longest) + 1):
                if completable[end_index]:
                    found_tokens += self.whole.get(remaining_name[:end_index], ())
        if not any_possible:
            return None
        token_mask = self.breaks.clone() if may_end else torch.zeros(self.vocab, dtype=torch.bool)
        token_mask[torch.tensor(found_tokens, dtype=torch.long)] = True
        return token_mask
