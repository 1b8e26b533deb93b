"""Tokens of one vocabulary that another writes with several of its own, and what a distribution of
the one says of the other.

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
    """State of one request: its text in the draft model's tokens, and the tokens of both."""

    translated: Translated
    shared: Shared
    seen: Seen  # what it sees of the cache
    study: Study | None = None  # where the draft model learns

    @classmethod
    def of(cls, ctx: Context, capacity: int) -> State:
        """`capacity`: first tokens of sequences that the tenant's cache knows."""
        translated = Translated(ctx)
        vocab = ctx.models["target"].vocab

        def pair_vocabularies() -> Shared:
            return Shared(
                translated.target_words, translated.model_words, vocab, translated.model.vocab
            )

        cache: Pairs = ctx.shared(lambda: Pairs(capacity), "sequences")
        return cls(translated, ctx.shared(pair_vocabularies, "pairs"), cache.snapshot())

    def observe(self, tokens: Iterable[int]) -> None:
        """Learns from what was committed."""
        note_sequences(self.seen, tokens, self.translated, self.shared)


def note_sequence(snapshot: Seen, sequence: Sequence, token: int) -> None:
    """Notes that these tokens of theirs are one of ours; what was noted longest ago gives way."""

    def add_pair(group: Group | None) -> Group:
        other_pairs = [pair for pair in group or () if pair[0] != sequence]
        return (*other_pairs[1 - EACH :], (sequence, token))

    snapshot.update(sequence[0], add_pair)


def note_sequences(
    snapshot: Seen, tokens: Iterable[int], translated: Translated, shared_pairs: Shared
) -> None:
    """Notes those of our tokens that the other model writes with several of its own."""
    for token in tokens:
        piece = translated.target_words.piece(token)
        if piece and token not in shared_pairs.partner:
            sequence = tuple(translated.model_words.encode(piece))
            if len(sequence) > 1 and translated.model_words.text(sequence) == piece:
                note_sequence(snapshot, sequence, token)


class Stream:
    """The other model's distributions after the text, as far as they are known, in one draft.

    `draft_tree`, `last_node`: the tree of its tokens, and the node of the text's last one;
    `max_forwards`: those that may still be made. Distributions have temperature and filters of the
    request; penalties and bans are about our ids.
    """

    def __init__(
        self,
        translated: Translated,
        sampler: Sampler,
        draft_tree: TokenTree,
        last_node: int,
        max_forwards: int,
    ):
        self.translated = translated
        self.sampler = sampler
        self.own = draft_tree
        self.left = max_forwards
        self.nodes: dict[Sequence, int] = {(): last_node}  # of each path below the text
        self.laws: dict[Sequence, torch.Tensor] = {}

    def request_laws(self, paths: Iterable[Sequence]) -> Generator[Message, Any, bool]:
        """Makes the distributions (V',) after these paths known, by one forward; False: none is
        left.
        """
        new_paths = [path for path in paths if path not in self.laws]
        if not new_paths:
            return True
        if not self.left:
            return False
        self.left -= 1
        for path in new_paths:
            for part_length in range(1, len(path) + 1):
                path_part = path[:part_length]
                if path_part not in self.nodes:
                    self.nodes[path_part] = self.own.add(self.nodes[path_part[:-1]], path_part[-1])
        rows = [self.nodes[path] for path in new_paths]
        reply = yield Ask(self.own, self.translated.name, self.translated.branch, rows=rows)
        self.laws |= dict(zip(new_paths, self.sampler.laws(reply.logits), strict=True))
        return True

    def laws_behind(self, path: Sequence) -> dict[Sequence, torch.Tensor]:
        """The known distributions after a path, by what follows it."""
        path_length = len(path)
        return {
            known_path[path_length:]: law
            for known_path, law in self.laws.items()
            if known_path[:path_length] == path
        }


class Reading:
    """The code words at one place of the stream.

    `laws`: their distribution (V',) after each known path, () of the place itself; `sequences`:
    those that are merged here, with our tokens; `barred`: continuations that would have been merged
    with what stands before the place. The distributions of all beginnings of both must be known.
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

    def path_chance(self, path: Sequence) -> float:
        """The probability that the stream goes on by these tokens."""
        probability = 1.0
        for index, token in enumerate(path):
            probability *= float(self.laws[path[:index]][token])
        return probability

    def impossible_rests(self, word: Sequence) -> frozenset[Sequence]:
        """Continuations that cannot follow this code word, since it would have been read as a
        longer one.
        """
        word_length = len(word)
        return frozenset(
            longer_word[word_length:]
            for longer_word in self.longer
            if len(longer_word) > word_length and longer_word[:word_length] == word
        )

    def word_mass(self, word: Sequence) -> float:
        """The probability that the stream begins with this word, and not with a longer or a barred
        one.

        Not renormalised for what is barred.
        """
        if any(word[: len(path)] == path for path in self.barred):
            return 0.0
        probability = self.path_chance(word)
        counted_rests: list[Sequence] = []  # continuations none of which begins another
        for rest in sorted(self.impossible_rests(word), key=len):
            if not any(rest[: len(counted_rest)] == counted_rest for counted_rest in counted_rests):
                counted_rests.append(rest)
                probability -= self.path_chance(word + rest)
        return max(probability, 0.0)

    def token_masses(self, ours: torch.Tensor, theirs: torch.Tensor, vocab: int) -> torch.Tensor:
        """Masses (vocab,) of our tokens; `ours`, `theirs` (n,): ids of the single ones of both.

        They sum to less than 1 where some of their tokens are none of ours.
        """
        first_probs = self.laws[()]
        masses = first_probs.new_zeros(vocab)
        masses[ours] = first_probs[theirs]
        for token in {path[0] for path in self.longer}:
            masses[ours[theirs == token]] = self.word_mass((token,))
        for sequence, token in self.sequences.items():
            masses[token] += self.word_mass(sequence)
        return masses
