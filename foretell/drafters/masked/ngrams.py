"""A distribution of the next token by counts of n-grams, of one text that grows or of several
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

Gram = tuple[int, ...]


class Ngrams:
    """Counts of what followed each context of 0 to `order` - 1 tokens in one text."""

    def __init__(self, order: int, tokens: Iterable[int] = ()):
        self.order = order
        self.rows: dict[Gram, Counter[int]] = {}
        self.totals: Counter[Gram] = Counter()
        self.tail: Gram = ()
        self.learn_tokens(tokens)

    def learn_tokens(self, tokens: Iterable[int]) -> None:
        """Takes in what follows the text so far."""
        for token in tokens:
            for context_start in range(len(self.tail) + 1):
                context = self.tail[context_start:]
                self.rows.setdefault(context, Counter())[token] += 1
                self.totals[context] += 1
            self.tail = (*self.tail, token)[-(self.order - 1) :] if self.order > 1 else ()


def token_probability(
    texts: Sequence[Ngrams], context: Sequence[int], token: int, vocab: int
) -> float:
    """The probability of a token after `context`, by the counts of all `texts`, which have one
    order.

    Each longer context is interpolated with the next shorter one, the shortest with an even
    distribution over `vocab` tokens, and weighs the more the fewer different tokens followed it
    (Witten and Bell, 1991). So no token is impossible, and the probabilities of all sum to 1.
    """
    estimate = 1 / vocab
    max_length = min(len(context), texts[0].order - 1)
    for part_length in range(max_length + 1):
        context_part = tuple(context[len(context) - part_length :])
        context_total = sum(text.totals[context_part] for text in texts)
        if not context_total:
            break  # no longer one was met either
        rows = [text.rows.get(context_part) for text in texts]
        known_rows = [row for row in rows if row is not None]
        token_hits = sum(row[token] for row in known_rows)
        kind_count = sum(len(row) for row in known_rows)
        estimate = (token_hits + kind_count * estimate) / (context_total + kind_count)
    return estimate
