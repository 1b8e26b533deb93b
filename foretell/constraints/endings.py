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

from foretell.constraints.compiling import add_distinctness, build_grammar
from foretell.constraints.grammar_text import bound_form, free_parts

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
    """The alphabet that endings are spelled with: bytes as tokens, and a vocabulary's special
    tokens.

    Special tokens have their own ids, and bytes those from `base` on.
    """

    def __init__(self, vocab_size: int, special_names: Mapping[int, str], end_token: int):
        """`end_token`: the special token that ends texts."""
        self.vocab = vocab_size
        self.specials = dict(special_names)
        self.end = end_token
        self.base = -(-vocab_size // 8) * 8
        self.special_token_ids = sorted(special_names)
        self.eos_token_id, self.bos_token_id = end_token, None
        self.tokens = [b""] * self.base + [bytes([byte]) for byte in range(256)]
        for token, name in special_names.items():
            self.tokens[token] = name.encode("utf-8", "replace")
        token_count = self.base + 256
        wrapped_tokenizer = TokenizerWrapper(self)
        self.tokenizer = LLTokenizer(
            wrapped_tokenizer, n_vocab=token_count, eos_token=end_token, slices=[]
        )

    def __call__(self, text: bytes) -> list[int]:
        return [self.base + byte for byte in text]

    def following_tokens(self, mask_bits: bytes, byte_order: bytes = ORDER) -> Iterator[int]:
        """Yields the tokens that may follow by a mask, in the order in which they are tried."""
        byte_bits = int.from_bytes(mask_bits[self.base >> 3 :], "little")
        any_allowed = False
        for byte in byte_order:
            if byte_bits >> byte & 1:
                any_allowed = True
                yield self.base + byte
        for byte in () if any_allowed else ESCAPES:
            if byte_bits >> byte & 1:
                yield self.base + byte
        if any(mask_bits[: self.base >> 3]):
            for token in range(self.base):
                if token != self.end and allows_token(mask_bits, token):
                    yield token

    def start_matcher(self, grammar: str, limits: LLParserLimits | None = None) -> LLMatcher:
        """Makes a matcher, which may be in error. `limits`: bounds its work."""
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)


def allows_token(mask_bits: bytes, token: int) -> bool:
    return token >> 3 < len(mask_bits) and bool(mask_bits[token >> 3] >> (token & 7) & 1)


class Effort:
    """The budget of a search: masks that may still be looked at, bytes that may be read again."""

    def __init__(self, remaining: int):
        self.remaining = remaining

    def spend_effort(self, amount: int = 1) -> bool:
        """Takes an amount off the budget; returns whether there was so much."""
        self.remaining -= amount
        return self.remaining >= 0


class Search:
    """Finds endings of one form, as lists of the alphabet's ids."""

    def __init__(self, alphabet: Alphabet, name: str, source: str):
        """`name` and `source`: kind and text of the form, as constraints.compiling has it for
        llguidance.
        """
        self.alphabet = alphabet
        self.name = name
        self.source = source
        self.parts: list[list[int]] = []  # what ends a free part of the form
        self._bounded: dict[int, LLMatcher | None] = {}

    @classmethod
    def begin_search(
        cls, alphabet: Alphabet, name: str, source: str
    ) -> tuple[Search, LLMatcher, list[int] | None]:
        """Returns the search of a form, the matcher of its beginning and an ending there."""
        search = cls(alphabet, name, source)
        matcher = search.start_matcher()
        if matcher.is_error():
            return search, matcher, None
        for free_part in free_parts(name, source):
            part_search = cls(alphabet, *free_part)
            part_matcher = part_search.start_matcher()
            part_ending = (
                None
                if part_matcher.is_error()
                else part_search.find_ending(part_matcher, (), (), FIRST // 2)
            )
            if part_ending:
                search.parts.append(part_ending)
        ending = search.find_ending(matcher, (), (), FIRST)
        return search, matcher, None if ending is None else search.without_detours(matcher, ending)

    def start_matcher(self) -> LLMatcher:
        """The matcher of the form's beginning, which may be in error."""
        matcher = self.alphabet.start_matcher(build_grammar(self.name, self.source))
        if not matcher.is_error():
            base, tokens = self.alphabet.base, self.alphabet.tokens
            token_bytes = [b""] * base + tokens[base:]  # special tokens have no text
            matcher = add_distinctness(matcher, self.name, self.source, token_bytes)
        matcher.compute_bitmask()
        return matcher

    def find_ending(
        self, matcher: LLMatcher, text: Sequence[int], known_words: Sequence[list[int]], effort: int
    ) -> list[int] | None:
        """Finds an ending after `text`, where `matcher` stands; None: none was found.
        `known_words`: known endings of other texts, which often have its last part; `effort`: of
        each of three tries.
        """
        ending = None
        if self.name != "regex":
            ending = self.walk_to_end(matcher, known_words, Effort(effort))
        if ending is None:
            ending = self._find_bounded(matcher, text, known_words, Effort(effort))
        if ending is None and self.name != "regex":
            ending = self.walk_to_end(matcher, known_words, Effort(effort), restless=True)
        return ending

    def find_near(
        self, matcher: LLMatcher, known_words: Sequence[list[int]], effort: int
    ) -> list[int] | None:
        """Finds an ending without reading a text, and so with less work; it may find none."""
        return self.walk_to_end(matcher, known_words, Effort(effort))

    def ends_text(self, matcher: LLMatcher, ending_ids: list[int]) -> bool:
        """Whether these ids end the text."""
        return bool(
            matcher.validate_tokens([*ending_ids, self.alphabet.end]) == len(ending_ids) + 1
        )

    def shortest_tail(
        self, matcher: LLMatcher, known_words: Sequence[list[int]], mask_bits: bytes
    ) -> list[int] | None:
        """The shortest last part of a word that ends the text here, if one does. `mask_bits`: bytes
        that may follow.
        """
        shortest: list[int] | None = None
        for word in known_words:
            max_length = len(word) if shortest is None else min(len(word), len(shortest) - 1)
            for tail_length in range(1, max_length + 1):
                word_tail = word[len(word) - tail_length :]
                if allows_token(mask_bits, word_tail[0]) and self.ends_text(matcher, word_tail):
                    shortest = word_tail
                    break
        return shortest

    def walk_to_end(
        self,
        start_matcher: LLMatcher,
        known_words: Sequence[list[int]],
        effort: Effort,
        restless: bool = False,
        guiding_order: bytes = b"",
    ) -> list[int] | None:
        """Walks from place to place to an end. `restless`: from places that look alike, nothing is
        taken twice where there is another way; `guiding_order`: every way leads to an end, in this
        order.
        """
        matcher = start_matcher.deep_copy()
        walked_tokens: list[int] = []
        taken_steps: set[tuple[bytes, int]] = set()
        while len(walked_tokens) <= LONGEST and effort.spend_effort():
            mask_bits = matcher.compute_bitmask()
            if matcher.is_error():
                return None
            if matcher.is_accepting():
                return walked_tokens
            word_tail = self.shortest_tail(matcher, known_words, mask_bits)
            if word_tail is not None:
                return walked_tokens + word_tail
            next_token = next(
                self.alphabet.following_tokens(mask_bits, guiding_order or ORDER), None
            )
            if guiding_order != PLAIN and next_token is not None:
                leading_token = self._next_token(
                    matcher, mask_bits, taken_steps, effort, FEW if guiding_order else 256
                )
                next_token = (
                    next_token if leading_token is None and guiding_order else leading_token
                )
            if restless and next_token is not None:
                taken_steps.add((mask_bits, next_token))
            leading_tokens = (
                self._leave_part(matcher, mask_bits, effort) if next_token is None else [next_token]
            )
            if leading_tokens is None:
                return None
            matcher.try_consume_tokens(leading_tokens)
            walked_tokens += leading_tokens
        return None

    def _leave_part(self, matcher: LLMatcher, mask_bits: bytes, effort: Effort) -> list[int] | None:
        """Finds what ends the free part that the text is in: the last part of an ending of one."""
        for part_ending in self.parts:
            for tail_length in range(1, len(part_ending) + 1):
                leading_tokens = part_ending[len(part_ending) - tail_length :]
                if not allows_token(mask_bits, leading_tokens[0]) or not effort.spend_effort():
                    continue
                next_matcher = matcher.deep_copy()
                if next_matcher.try_consume_tokens(leading_tokens) < len(leading_tokens):
                    continue
                next_bits = next_matcher.compute_bitmask()
                if not next_matcher.is_error() and (
                    next_matcher.is_accepting() or next_bits != mask_bits
                ):
                    return leading_tokens
        return None

    def _next_token(
        self,
        matcher: LLMatcher,
        mask_bits: bytes,
        taken_steps: set[tuple[bytes, int]],
        effort: Effort,
        max_tokens: int,
    ) -> int | None:
        """Chooses, of the first `max_tokens`, a token that ends the text or leads elsewhere, rather
        one that was not taken before.
        """
        taken_before = None
        for token in islice(self.alphabet.following_tokens(mask_bits), max_tokens):
            if not effort.spend_effort():
                break
            next_matcher = matcher.deep_copy()
            next_matcher.consume_token(token)
            next_bits = next_matcher.compute_bitmask()
            if next_matcher.is_error():
                continue
            if next_matcher.is_accepting():
                return token
            if next_bits != mask_bits:
                if (mask_bits, token) not in taken_steps:
                    return token
                taken_before = token if taken_before is None else taken_before
        return taken_before

    # --- with bounded parts

    def _find_bounded(
        self,
        matcher: LLMatcher,
        text: Sequence[int],
        known_words: Sequence[list[int]],
        effort: Effort,
    ) -> list[int] | None:
        """Finds an ending with free parts as short as any ending has."""
        text_length = len(text) if self.name == "regex" else 0
        failed_bound, tried_bound, ending = 0, 0, None
        bound_step = 1
        while ending is None and bound_step <= LONGEST + len(text) - text_length:
            tried_bound = bound_step
            ending = self._find_within(
                matcher, text, known_words, text_length + tried_bound, effort
            )
            if ending is None:
                failed_bound, bound_step = tried_bound, 2 * bound_step
            if effort.remaining < 0:
                return None
        while ending is not None and tried_bound - failed_bound > 1:
            middle_bound = (failed_bound + tried_bound) // 2
            shorter_ending = self._find_within(
                matcher, text, known_words, text_length + middle_bound, effort
            )
            if shorter_ending is None:
                failed_bound = middle_bound
            else:
                tried_bound, ending = middle_bound, shorter_ending
        return ending

    def _find_within(
        self,
        matcher: LLMatcher,
        text: Sequence[int],
        known_words: Sequence[list[int]],
        max_characters: int,
        effort: Effort,
    ) -> list[int] | None:
        """Finds an ending with at most so many characters in each free part of the text."""
        bounded_matcher = self._bounded_matcher(max_characters)
        if bounded_matcher is None or not effort.spend_effort(COMPILED):
            return None
        bounded_matcher = bounded_matcher.deep_copy()
        for run_start in range(0, len(text), RUN):
            text_run = list(text[run_start : run_start + RUN])
            if not effort.spend_effort(len(text_run)):
                return None
            bounded_matcher.compute_bitmask()
            if bounded_matcher.try_consume_tokens(text_run) < len(text_run):
                return None
        byte_order = PLAIN if self.name == "regex" else ORDER
        ending = self.walk_to_end(
            bounded_matcher,
            () if byte_order == PLAIN else known_words,
            effort,
            guiding_order=byte_order,
        )
        return ending if ending is not None and self.ends_text(matcher, ending) else None

    def _bounded_matcher(self, max_characters: int) -> LLMatcher | None:
        if max_characters not in self._bounded:
            grammar = bound_form(self.name, self.source, max_characters)
            new_matcher = None if grammar is None else self.alphabet.start_matcher(grammar, FUEL)
            if len(self._bounded) > 64:
                self._bounded.clear()
            self._bounded[max_characters] = (
                None if new_matcher is None or new_matcher.is_error() else new_matcher
            )
        return self._bounded[max_characters]

    # --- shorter

    def without_detours(self, start: LLMatcher, ending: list[int]) -> list[int]:
        """Shortens the ending by parts that may be left out, such as properties a schema does not
        ask for: those between two places after the same byte, or before such a place.
        """
        matcher = start.deep_copy()
        remaining_checks = CHECKED
        position = 0
        while position < len(ending):
            for later_position in range(len(ending) - 1, position, -1):
                if position and ending[later_position - 1] != ending[position - 1]:
                    continue
                remaining_checks -= 1
                if remaining_checks < 0:
                    return ending
                if self.ends_text(matcher, ending[later_position:]):
                    ending = ending[:position] + ending[later_position:]
                    break
            matcher.compute_bitmask()
            matcher.consume_token(ending[position])
            position += 1
        return ending
