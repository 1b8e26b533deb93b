"""How a text of some form can be brought to an end, and in how few tokens.

A grammar says which bytes may follow, not how far it is to an end. So ends are looked for, byte by
byte: brackets and quotes first, otherwise whatever changes what may follow. Where nothing shows the
way, as in `.*ab`, it is looked for in the same form with bounded parts: see
constraints.grammar_text. What is found is an ending, since the form itself is asked about it; of an
empty text and a regular expression it is one of the fewest characters. Most tokens leave the ending
of the text before them valid, or a part of it, so that there is little to look for.

How much is looked at is counted, not timed, so that what is found depends on the text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from foretell.constraints.compiling import distinct, grammar_of
from foretell.constraints.grammar_text import bounded, parts

LONGEST = 1024  # bytes of an ending at most, and characters of a bounded part
FIRST = 4096  # effort for an ending of an empty text
CHECKED = 4096  # parts of an ending that are tried for leaving out, at most
FEW = 8  # that are tried at a place from which every way leads to an end
COMPILED = 32  # the effort of compiling a bounded form
RUN = 32  # bytes that are read between two masks: llguidance limits the work between them
# Of llguidance's work on a bounded form: to know whether it has a text at all is the most of it.
FUEL = LLParserLimits(initial_lexer_fuel=100_000, step_lexer_fuel=50_000)
# What is tried first, and last; escapes and parts of characters only where nothing else may come,
# since what may follow changes there and comes back.
CLOSING = b'}],:0"'
OPENING = b"(<[{ \t\r\n"
ESCAPES = bytes([ord("\\"), *range(128, 256)])
REST = bytes(byte for byte in range(256) if byte not in CLOSING + OPENING + ESCAPES)
ORDER = CLOSING + REST + OPENING
# The same in a regular expression, which closes nothing.
WORDS = b"abcdefghijklmnopqrstuvwxyz0123456789"
PLAIN = WORDS + bytes(byte for byte in ORDER if byte not in WORDS)


class Alphabet:
    """Bytes as tokens, beside the special tokens of a vocabulary: what endings are spelled with.

    Special tokens have their own ids, and bytes those from `base` on.
    """

    def __init__(self, vocab: int, specials: Mapping[int, str], end: int):
        """`end`: the special token that ends texts."""
        self.vocab = vocab
        self.specials = dict(specials)
        self.end = end
        self.base = -(-vocab // 8) * 8
        self.special_token_ids = sorted(specials)
        self.eos_token_id, self.bos_token_id = end, None
        self.tokens = [b""] * self.base + [bytes([byte]) for byte in range(256)]
        for token, name in specials.items():
            self.tokens[token] = name.encode("utf-8", "replace")
        size = self.base + 256
        wrapped = TokenizerWrapper(self)
        self.tokenizer = LLTokenizer(wrapped, n_vocab=size, eos_token=end, slices=[])

    def __call__(self, text: bytes) -> list[int]:
        return [self.base + byte for byte in text]

    def following(self, bits: bytes, order: bytes = ORDER) -> Iterator[int]:
        """What may follow by a mask, in the order in which it is tried."""
        number = int.from_bytes(bits[self.base >> 3 :], "little")
        some = False
        for byte in order:
            if number >> byte & 1:
                some = True
                yield self.base + byte
        for byte in () if some else ESCAPES:
            if number >> byte & 1:
                yield self.base + byte
        if any(bits[: self.base >> 3]):
            for token in range(self.base):
                if token != self.end and allows(bits, token):
                    yield token

    def matcher(self, grammar: str, limits: LLParserLimits | None = None) -> LLMatcher:
        """A matcher, which may be in error. `limits`: of the work."""
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)


def allows(bits: bytes, one: int) -> bool:
    return one >> 3 < len(bits) and bool(bits[one >> 3] >> (one & 7) & 1)


class Effort:
    """How much may still be looked at: masks, and bytes that are read again."""

    def __init__(self, left: int):
        self.left = left

    def spend(self, amount: int = 1) -> bool:
        """Whether there was so much."""
        self.left -= amount
        return self.left >= 0


class Search:
    """How endings of one form are found. They are lists of the alphabet's ids."""

    def __init__(self, alphabet: Alphabet, name: str, source: str):
        """`name` and `source`: of the form, as constraints.compiling has it for llguidance."""
        self.alphabet = alphabet
        self.name = name
        self.source = source
        self.parts: list[list[int]] = []  # what ends a free part of the form
        self._bounded: dict[int, LLMatcher | None] = {}

    @classmethod
    def begin(
        cls, alphabet: Alphabet, name: str, source: str
    ) -> tuple[Search, LLMatcher, list[int] | None]:
        """The search of a form, the matcher of its beginning and an ending there."""
        search = cls(alphabet, name, source)
        start = search.start()
        if start.is_error():
            return search, start, None
        for part in parts(name, source):
            inner = cls(alphabet, *part)
            begun = inner.start()
            found = None if begun.is_error() else inner.find(begun, (), (), FIRST // 2)
            if found:
                search.parts.append(found)
        ending = search.find(start, (), (), FIRST)
        return search, start, None if ending is None else search.without_detours(start, ending)

    def start(self) -> LLMatcher:
        """The matcher of the form's beginning, which may be in error."""
        matcher = self.alphabet.matcher(grammar_of(self.name, self.source))
        if not matcher.is_error():
            base, tokens = self.alphabet.base, self.alphabet.tokens
            pieces = [b""] * base + tokens[base:]  # special tokens have no text
            matcher = distinct(matcher, self.name, self.source, pieces)
        matcher.compute_bitmask()
        return matcher

    def find(
        self, matcher: LLMatcher, text: Sequence[int], words: Sequence[list[int]], effort: int
    ) -> list[int] | None:
        """An ending behind `text`, where `matcher` stands; None: none was found. `words`: known
        endings of other texts, which often have its last part; `effort`: of each of three tries.
        """
        found = None
        if self.name != "regex":
            found = self.walk(matcher, words, Effort(effort))
        if found is None:
            found = self._by_bounds(matcher, text, words, Effort(effort))
        if found is None and self.name != "regex":
            found = self.walk(matcher, words, Effort(effort), restless=True)
        return found

    def find_near(
        self, matcher: LLMatcher, words: Sequence[list[int]], effort: int
    ) -> list[int] | None:
        """The same without a text, and so with less work, which may find none."""
        return self.walk(matcher, words, Effort(effort))

    def ends(self, matcher: LLMatcher, ids: list[int]) -> bool:
        """Whether these end the text."""
        return bool(matcher.validate_tokens([*ids, self.alphabet.end]) == len(ids) + 1)

    def tail(self, matcher: LLMatcher, words: Sequence[list[int]], bits: bytes) -> list[int] | None:
        """The shortest last part of a word that ends the text here, if one does. `bits`: of what
        may follow.
        """
        best: list[int] | None = None
        for word in words:
            most = len(word) if best is None else min(len(word), len(best) - 1)
            for size in range(1, most + 1):
                part = word[len(word) - size :]
                if allows(bits, part[0]) and self.ends(matcher, part):
                    best = part
                    break
        return best

    def walk(
        self,
        before: LLMatcher,
        words: Sequence[list[int]],
        effort: Effort,
        restless: bool = False,
        shown: bytes = b"",
    ) -> list[int] | None:
        """An ending, going from place to place. `restless`: from places that look alike, nothing is
        taken twice where there is more; `shown`: every way leads to an end, in this order.
        """
        matcher = before.deep_copy()
        found: list[int] = []
        taken: set[tuple[bytes, int]] = set()
        while len(found) <= LONGEST and effort.spend():
            bits = matcher.compute_bitmask()
            if matcher.is_error():
                return None
            if matcher.is_accepting():
                return found
            rest = self.tail(matcher, words, bits)
            if rest is not None:
                return found + rest
            one = next(self.alphabet.following(bits, shown or ORDER), None)
            if shown != PLAIN and one is not None:
                other = self._next(matcher, bits, taken, effort, FEW if shown else 256)
                one = one if other is None and shown else other
            if restless and one is not None:
                taken.add((bits, one))
            led = self._out(matcher, bits, effort) if one is None else [one]
            if led is None:
                return None
            matcher.try_consume_tokens(led)
            found += led
        return None

    def _out(self, matcher: LLMatcher, bits: bytes, effort: Effort) -> list[int] | None:
        """What ends the free part that the text is in: the last part of what ends one."""
        for part in self.parts:
            for size in range(1, len(part) + 1):
                led = part[len(part) - size :]
                if not allows(bits, led[0]) or not effort.spend():
                    continue
                behind = matcher.deep_copy()
                if behind.try_consume_tokens(led) < len(led):
                    continue
                following = behind.compute_bitmask()
                if not behind.is_error() and (behind.is_accepting() or following != bits):
                    return led
        return None

    def _next(
        self,
        matcher: LLMatcher,
        bits: bytes,
        taken: set[tuple[bytes, int]],
        effort: Effort,
        most: int,
    ) -> int | None:
        """Of the first `most` one that ends the text or leads elsewhere, rather one that was not
        taken.
        """
        again = None
        for one in islice(self.alphabet.following(bits), most):
            if not effort.spend():
                break
            behind = matcher.deep_copy()
            behind.consume_token(one)
            following = behind.compute_bitmask()
            if behind.is_error():
                continue
            if behind.is_accepting():
                return one
            if following != bits:
                if (bits, one) not in taken:
                    return one
                again = one if again is None else again
        return again

    # --- with bounded parts

    def _by_bounds(
        self, matcher: LLMatcher, text: Sequence[int], words: Sequence[list[int]], effort: Effort
    ) -> list[int] | None:
        """An ending with parts as short as there is one with."""
        begun = len(text) if self.name == "regex" else 0
        low, high, found = 0, 0, None
        step = 1
        while found is None and step <= LONGEST + len(text) - begun:
            high = step
            found = self._within(matcher, text, words, begun + high, effort)
            if found is None:
                low, step = high, 2 * step
            if effort.left < 0:
                return None
        while found is not None and high - low > 1:
            middle = (low + high) // 2
            shorter = self._within(matcher, text, words, begun + middle, effort)
            if shorter is None:
                low = middle
            else:
                high, found = middle, shorter
        return found

    def _within(
        self,
        matcher: LLMatcher,
        text: Sequence[int],
        words: Sequence[list[int]],
        most: int,
        effort: Effort,
    ) -> list[int] | None:
        """An ending with at most so many characters in each free part of the text."""
        less = self._less(most)
        if less is None or not effort.spend(COMPILED):
            return None
        less = less.deep_copy()
        for begin in range(0, len(text), RUN):
            run = list(text[begin : begin + RUN])
            if not effort.spend(len(run)):
                return None
            less.compute_bitmask()
            if less.try_consume_tokens(run) < len(run):
                return None
        order = PLAIN if self.name == "regex" else ORDER
        ending = self.walk(less, () if order == PLAIN else words, effort, shown=order)
        return ending if ending is not None and self.ends(matcher, ending) else None

    def _less(self, most: int) -> LLMatcher | None:
        if most not in self._bounded:
            grammar = bounded(self.name, self.source, most)
            made = None if grammar is None else self.alphabet.matcher(grammar, FUEL)
            if len(self._bounded) > 64:
                self._bounded.clear()
            self._bounded[most] = None if made is None or made.is_error() else made
        return self._bounded[most]

    # --- shorter

    def without_detours(self, start: LLMatcher, ending: list[int]) -> list[int]:
        """The ending without parts that may be left out, such as properties a schema does not ask
        for: those between two places behind the same byte, or before such a place.
        """
        matcher = start.deep_copy()
        checks = CHECKED
        place = 0
        while place < len(ending):
            for later in range(len(ending) - 1, place, -1):
                if place and ending[later - 1] != ending[place - 1]:
                    continue
                checks -= 1
                if checks < 0:
                    return ending
                if self.ends(matcher, ending[later:]):
                    ending = ending[:place] + ending[later:]
                    break
            matcher.compute_bitmask()
            matcher.consume_token(ending[place])
            place += 1
        return ending
