"""Tokens of one vocabulary that another writes with several of its own, and what a law of the one
says of the other.

A draft model's text is a stream of its tokens. Read from the left it falls into code words: the
longest sequence that stands for a token of the target, else a single token that both vocabularies
have. So a token that begins longer sequences stands for itself only where none of these follows,
and what follows it is none of their rests. `Reading` takes both into account.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.distribution import Sampler
from foretell.core.tokenizer_bytes import Shared
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message
from foretell.models.online import Study
from foretell.models.translated import Translated
from foretell.ops.versions import Snapshot, Table

if TYPE_CHECKING:
    from foretell.core.context import Context

Sequence = tuple[int, ...]  # their tokens
Group = tuple[tuple[Sequence, int], ...]  # sequences with their tokens, the newest last
Pairs = Table[int, Group]  # by a sequence's first token
Seen = Snapshot[int, Group]

EACH = 32  # sequences with one first token, at most


@dataclass
class State:
    """Of one request: its text in the draft model's tokens, and the tokens of both."""

    translated: Translated
    shared: Shared
    seen: Seen  # what it sees of the cache
    study: Study | None = None  # where the draft model learns

    @classmethod
    def of(cls, ctx: Context, capacity: int) -> State:
        """`capacity`: first tokens of sequences that the tenant's cache knows."""
        translated = Translated(ctx)
        vocab = ctx.models["target"].vocab

        def pairs() -> Shared:
            return Shared(translated.ours, translated.theirs, vocab, translated.model.vocab)

        cache: Pairs = ctx.shared(lambda: Pairs(capacity), "sequences")
        return cls(translated, ctx.shared(pairs, "pairs"), cache.snapshot())

    def observe(self, tokens: Iterable[int]) -> None:
        """Learns from what was committed."""
        learn_from(self.seen, tokens, self.translated, self.shared)


def learn(seen: Seen, sequence: Sequence, token: int) -> None:
    """Notes that these tokens of theirs are one of ours; what was noted longest ago gives way."""

    def change(group: Group | None) -> Group:
        others = [pair for pair in group or () if pair[0] != sequence]
        return (*others[1 - EACH :], (sequence, token))

    seen.update(sequence[0], change)


def learn_from(seen: Seen, tokens: Iterable[int], translated: Translated, shared: Shared) -> None:
    """Notes those of our tokens that the other model writes with several of its own."""
    for token in tokens:
        piece = translated.ours.piece(token)
        if piece and token not in shared.partner:
            sequence = tuple(translated.theirs.encode(piece))
            if len(sequence) > 1 and translated.theirs.text(sequence) == piece:
                learn(seen, sequence, token)


class Stream:
    """The other model's laws behind the text, as far as they are known, in one draft.

    `own`, `last`: the tree of its tokens, and the node of the text's last one; `left`: forwards
    that may still be made. Laws have temperature and filters of the request; penalties and bans
    are about our ids.
    """

    def __init__(
        self, translated: Translated, sampler: Sampler, own: TokenTree, last: int, left: int
    ):
        self.translated = translated
        self.sampler = sampler
        self.own = own
        self.left = left
        self.nodes: dict[Sequence, int] = {(): last}  # of each path below the text
        self.laws: dict[Sequence, torch.Tensor] = {}

    def know(self, paths: Iterable[Sequence]) -> Generator[Message, Any, bool]:
        """Makes the laws (V',) behind these paths known, by one forward; False: none is left."""
        new = [path for path in paths if path not in self.laws]
        if not new:
            return True
        if not self.left:
            return False
        self.left -= 1
        for path in new:
            for size in range(1, len(path) + 1):
                part = path[:size]
                if part not in self.nodes:
                    self.nodes[part] = self.own.add(self.nodes[part[:-1]], part[-1])
        rows = [self.nodes[path] for path in new]
        reply = yield Ask(self.own, self.translated.name, self.translated.branch, rows=rows)
        self.laws |= dict(zip(new, self.sampler.laws(reply.logits), strict=True))
        return True

    def behind(self, path: Sequence) -> dict[Sequence, torch.Tensor]:
        """The known laws behind a path, by what follows it."""
        size = len(path)
        return {other[size:]: law for other, law in self.laws.items() if other[:size] == path}


class Reading:
    """The code words at one place of the stream.

    `laws`: their law (V',) behind each known path, () of the place itself; `sequences`: those that
    are merged here, with our tokens; `barred`: continuations that would have been merged with what
    stands before the place. The laws of all beginnings of both must be known.
    """

    def __init__(
        self,
        laws: Mapping[Sequence, torch.Tensor],
        sequences: Mapping[Sequence, int],
        barred: Iterable[Sequence] = (),
    ):
        self.laws = laws
        self.sequences = sequences
        self.barred = frozenset(barred)
        self.longer = sorted({*sequences, *self.barred}, key=len)

    def chance(self, path: Sequence) -> float:
        """That the stream goes on by these tokens."""
        chance = 1.0
        for place, token in enumerate(path):
            chance *= float(self.laws[path[:place]][token])
        return chance

    def rests(self, word: Sequence) -> frozenset[Sequence]:
        """What cannot follow this code word, since it would have been read as a longer one."""
        size = len(word)
        return frozenset(
            other[size:] for other in self.longer if len(other) > size and other[:size] == word
        )

    def mass(self, word: Sequence) -> float:
        """The chance that the stream begins with this word, and not with a longer or a barred one.

        Not renormalised for what is barred.
        """
        if any(word[: len(path)] == path for path in self.barred):
            return 0.0
        chance = self.chance(word)
        taken: list[Sequence] = []  # continuations none of which begins another
        for rest in sorted(self.rests(word), key=len):
            if not any(rest[: len(other)] == other for other in taken):
                taken.append(rest)
                chance -= self.chance(word + rest)
        return max(chance, 0.0)

    def law(self, ours: torch.Tensor, theirs: torch.Tensor, vocab: int) -> torch.Tensor:
        """Masses (vocab,) of our tokens; `ours`, `theirs` (n,): ids of the single ones of both.

        They sum to less than 1 where some of their tokens are none of ours.
        """
        first = self.laws[()]
        found = first.new_zeros(vocab)
        found[ours] = first[theirs]
        for token in {path[0] for path in self.longer}:
            found[ours[theirs == token]] = self.mass((token,))
        for sequence, token in self.sequences.items():
            found[token] += self.mass(sequence)
        return found
