"""Texts with passkeys planted in them, and the questions that ask for them at the end.

A passkey is a row of words, each drawn by itself, so nothing but the place where it was planted
tells its next word. As in DuoAttention (arXiv:2410.10819, section 3.2).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from foretell.errors import BadConfig

WORDS = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar "
    "papa quebec romeo sierra tango uniform victor whiskey xray yankee zulu"
).split()
ORDER = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
MOST = len(ORDER)
PLANTED = "\n\nThe {nth} passkey to the vault is this row of words: {key}\n\n"
ASKED = "What is the {nth} passkey to the vault?\nIt is this row of words:"
BEGIN = "This is a long book.\n\n"
END = "\n\nThat was the book.\n\n"
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Planted:
    """Text with passkeys. Questions begin at the token `asked`; `answers`: where passkeys' tokens
    stand that answer them, and end.
    """

    tokens: tuple[int, ...]
    question_start: int
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Planting:
    """Settings by which passkeys are planted."""

    keys: int  # passkeys of a text
    words: int  # of each
    shortest: int  # tokens of a text
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.keys <= MOST:
            raise BadConfig.field("keys", self.keys, f"between 1 and {MOST}")
        if self.words < 1:
            raise BadConfig.field("words", self.words, "at least 1")
        if not 1 <= self.shortest <= self.longest:
            raise BadConfig.field("shortest", self.shortest, f"between 1 and {self.longest:,}")

    def texts(self, encode: Encode, books: Iterable[str], seed: int) -> Iterator[Planted]:
        """Texts without end, of growing lengths over and over, made of one book after the other.

        Raises BadConfig where the books are too short, or texts for their passkeys.
        """
        generator = random.Random(seed)
        book_tokens: list[int] = []
        steps = 16
        remaining_tokens = chain.from_iterable(map(encode, books))
        number = 0
        while True:
            length = self.shortest + (self.longest - self.shortest) * (number % steps) // (
                steps - 1
            )
            passkeys = [" ".join(generator.choices(WORDS, k=self.words)) for _ in range(self.keys)]
            planted = [
                encode(PLANTED.format(nth=nth, key=key))
                for nth, key in zip(ORDER, passkeys, strict=False)
            ]
            question_tokens, answers = self._questions(encode, passkeys)
            opening, closing = encode(BEGIN), encode(END)
            book_count = (
                length - len(opening) - len(closing) - len(question_tokens) - sum(map(len, planted))
            )
            if book_count < 1:
                need = f"at least {length - book_count + 1} for the passkeys"
                raise BadConfig.field("shortest", self.shortest, need)
            while len(book_tokens) < book_count:
                token = next(remaining_tokens, None)
                if token is None:
                    raise BadConfig("the texts are too short; give longer ones, or more")
                book_tokens.append(token)
            depths = sorted(generator.sample(range(50, 951), self.keys))
            places = [book_count * depth // 1000 for depth in depths]
            tokens = [*opening, *book_tokens[: places[0]]]
            for key, place, next_place in zip(
                planted, places, [*places[1:], book_count], strict=True
            ):
                tokens += [*key, *book_tokens[place:next_place]]
            tokens += closing
            book_tokens = book_tokens[book_count:]
            question_start = len(tokens)
            answer_spans = tuple(
                (question_start + answer_start, question_start + answer_end)
                for answer_start, answer_end in answers
            )
            yield Planted((*tokens, *question_tokens), question_start, answer_spans)
            number += 1

    def _questions(
        self, encode: Encode, keys: Sequence[str]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of questions and answers, and where the answers stand."""
        question_tokens: list[int] = []
        answers = []
        for nth, key in zip(ORDER, keys, strict=False):
            question_tokens += encode(ASKED.format(nth=nth))
            answer_start = len(question_tokens)
            question_tokens += encode(f" {key}")
            answers.append((answer_start, len(question_tokens)))
            question_tokens += encode("\n\n")
        return question_tokens, answers
