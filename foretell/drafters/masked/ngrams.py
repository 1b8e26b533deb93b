"""A law of the next token by counts of n-grams, of one text that grows or of several together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

Gram = tuple[int, ...]


class Ngrams:
    """What followed each context of 0 to `order` - 1 tokens in one text."""

    def __init__(self, order: int, tokens: Iterable[int] = ()):
        self.order = order
        self.rows: dict[Gram, Counter[int]] = {}
        self.totals: Counter[Gram] = Counter()
        self.tail: Gram = ()
        self.learn(tokens)

    def learn(self, tokens: Iterable[int]) -> None:
        """Takes in what follows the text so far."""
        for token in tokens:
            for start in range(len(self.tail) + 1):
                context = self.tail[start:]
                self.rows.setdefault(context, Counter())[token] += 1
                self.totals[context] += 1
            self.tail = (*self.tail, token)[-(self.order - 1) :] if self.order > 1 else ()


def chance(texts: Sequence[Ngrams], context: Sequence[int], token: int, vocab: int) -> float:
    """Of a token behind `context`, by the counts of all `texts`, which have one order.

    Each longer context is interpolated with the next shorter one, the shortest with an even law
    over `vocab` tokens, and weighs the more the fewer different tokens followed it (Witten and
    Bell, 1991). So no token is impossible, and the chances of all sum to 1.
    """
    found = 1 / vocab
    longest = min(len(context), texts[0].order - 1)
    for size in range(longest + 1):
        part = tuple(context[len(context) - size :])
        total = sum(text.totals[part] for text in texts)
        if not total:
            break  # no longer one was met either
        rows = [text.rows.get(part) for text in texts]
        known = [row for row in rows if row is not None]
        hits = sum(row[token] for row in known)
        kinds = sum(len(row) for row in known)
        found = (hits + kinds * found) / (total + kinds)
    return found
