"""JSON schemas, regular expressions and grammars as constraints on a model's tokens.

The work is llguidance's, which compiles a form against a tokenizer and says which tokens may come
next; this file knows how to ask it. A form is tried in a process that can be ended, then compiled
by whoever makes the request, and kept for the next one; the engine's thread only follows its texts.
What a schema says and llguidance cannot enforce is refused by name.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretell.constraints.compiling import distinct, grammar_of, source_of
from foretell.constraints.grammar_trials import TRIALS
from foretell.errors import BadConfig, Unsupported, first_line
from foretell.models.gguf.vocabulary import Vocabulary
from foretell.ops.common_prefix import common

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

    from foretell.constraints.ending_tokens import Endings, Spellings
    from foretell.constraints.endings import Alphabet

LARGEST = 2**18  # bytes of a form
SECONDS = 5.0  # that trying one may take
COMPILING = 1.0  # seconds of them for compiling it, which is done again
FORCED = 2**13  # bytes that follow for lack of a choice: a mask spells them all
KEPT = 64  # compiled forms of a tokenizer
USES = 256  # of a compiled form: what its matchers note of texts, for all of them, only grows
UNMASKED = 8  # questions about single tokens between two masks: see Matcher.permits
FAR = 32  # tokens of a text that a matcher goes back rather than leave a copy there
ASIDE = 32  # copies that are left


class Grammars:
    """The constraints of one tokenizer and the model it serves. Threads may share it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab: int, eos: Sequence[int] = ()
    ):
        """`vocab`: V of the model, which may have more tokens than the tokenizer."""
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.eos = list(eos)
        # By tenant, kind and text. None finds those of another, who could tell by the time.
        self._compiled: OrderedDict[tuple[str, str, str], Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def compile(
        self, form: Mapping[str, Any], tenant: str = "", deadline: float = math.inf
    ) -> Grammar:
        """The constraint of a form: json_schema, regex or grammar, and what it is.

        `tenant`: who asks; `deadline`: by time.perf_counter(), when nobody waits for it any longer.
        Raises BadConfig for a form that cannot be used or takes too much, Unsupported without
        llguidance or a tokenizer that can be read, DeadlineExceeded.
        """
        [(name, value)] = form.items()
        if self.tokenizer is None:
            raise Unsupported(
                f"{name}: this model has no tokenizer, so its tokens have no text; "
                "give a folder that has tokenizer files"
            )
        source = source_of(name, value)
        key = tenant, name, source
        with self._lock:
            known = self._compiled.get(key)
            if known is not None and known.usable and known.uses < USES:
                known.uses += 1
                self._compiled.move_to_end(key)
                return known
        grammar = self._made(name, source, tenant, deadline)
        start = grammar.matcher.deep_copy()
        start.compute_bitmask()
        nothing = start.is_error() and start.get_error().startswith("NoExtension")
        if nothing or not grammar.track().allowed(()).any():
            raise BadConfig(f"{name}: no text, or an empty one alone, has this form; change it")
        with self._lock:
            self._compiled[key] = grammar
            self._compiled.move_to_end(key)
            while len(self._compiled) > KEPT:
                self._forget_one()
        return grammar

    def _forget_one(self) -> None:
        """That was unused for longest, of the tenant that has most."""
        kept = Counter(tenant for tenant, *_ in self._compiled)
        most = max(kept.values())
        del self._compiled[next(key for key in self._compiled if kept[key[0]] == most)]

    def _made(self, name: str, source: str, tenant: str, deadline: float) -> Grammar:
        """Tries and compiles. Raises as `compile` does."""
        size = len(source.encode())
        if size > LARGEST:
            raise BadConfig(f"{name}: it has {size} bytes, at most {LARGEST} are read; shorten it")
        with self._reading:
            tokens, alphabet, spellings = self._tokens, self._alphabet, self._spellings
        from llguidance import LLMatcher

        from foretell.constraints.ending_tokens import Endings
        from foretell.constraints.endings import Search

        question = {
            "name": name,
            "source": source,
            "vocab": alphabet.vocab,
            "specials": alphabet.specials,
            "end": alphabet.end,
        }
        answer = TRIALS.ask(question, tenant, SECONDS, deadline)
        if "refused" in answer:
            raise BadConfig(answer["refused"])
        if answer["seconds"] > COMPILING:
            raise BadConfig(f"{name}: it takes too long to compile; simplify it")
        text = grammar_of(name, answer["source"])
        matcher, own = (
            distinct(LLMatcher(tokens, text, log_level=0), name, answer["source"], spellings.pieces)
            for _ in range(2)
        )
        search = Search(alphabet, name, answer["source"])
        search.parts = answer["parts"]
        endings = Endings.begin(search, spellings, own, search.start(), answer["ending"])
        return Grammar(matcher, name, self.vocab, self._ends(), endings)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        """The tokenizer as llguidance has it, which takes part of a second."""
        try:
            from llguidance import hf
        except ImportError as error:
            raise Unsupported(
                "json_schema, regex and grammar need the package llguidance: "
                "pip install 'foretell[constrain]'"
            ) from error
        tokenizer: Any = self.tokenizer
        ends: Any = self.eos or None  # None: the tokenizer's own
        try:
            if isinstance(tokenizer, Vocabulary):
                return tokenizer.for_forms(max(self.vocab, len(tokenizer)), ends)
            return hf.from_tokenizer(tokenizer, max(self.vocab, len(tokenizer)), ends)
        except Exception as error:  # a tokenizer that is not a fast one, or an unusual one
            raise Unsupported(
                f"json_schema, regex and grammar cannot read this model's tokenizer "
                f"({first_line(error)}); leave them out, or load a model whose tokenizer.json "
                "has a byte-level decoder"
            ) from error

    @cached_property
    def _alphabet(self) -> Alphabet:
        """What endings are looked for with."""
        from foretell.constraints.endings import Alphabet

        tokens: Any = self._tokens
        tokenizer: Any = self.tokenizer
        specials = {}
        for token in range(min(tokens.vocab_size, len(tokenizer))):
            if tokens.is_special_token(token):
                specials[token] = str(tokenizer.convert_ids_to_tokens(token))
        return Alphabet(tokens.vocab_size, specials, tokens.eos_token)

    @cached_property
    def _spellings(self) -> Spellings:
        """The bytes of the tokens; specials have none. Takes some 50 ms."""
        from foretell.constraints.ending_tokens import Spellings

        tokens = self._tokens
        return Spellings(
            [
                b"" if tokens.is_special_token(token) else tokens.decode_bytes([token])
                for token in range(self.vocab)
            ]
        )

    def _ends(self) -> list[int]:
        """Ids that stand for an end with llguidance."""
        return [token for token in self._tokens.eos_tokens if token < self.vocab]


class Grammar:
    """A compiled form; a Constraint."""

    def __init__(
        self, matcher: LLMatcher, name: str, vocab: int, ends: Sequence[int], endings: Endings
    ):
        """`matcher`: at the beginning, where it stays, as `endings` does; `name`: of the argument,
        for errors.
        """
        self.matcher = matcher
        self.name = name
        self.vocab = vocab
        self.ends = list(ends)
        self.endings = endings
        self.usable = True  # for new requests: no matcher has failed
        self.uses = 0

    def track(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """One branch's place in a grammar; a Tracker.

    It stands behind the output it was last asked about, `path`, and goes from there to the next
    one: back to where they part, then on. Where that is far, as with texts that are written side by
    side, a copy stays. Where a form leaves no choice of characters, llguidance allows the tokens
    alone that the tokenizer would write them with.
    """

    def __init__(self, grammar: Grammar):
        self.grammar = grammar
        self.matcher = grammar.matcher.deep_copy()
        self.path: list[int] = []
        self.bits: bytes | None = None  # of the tokens that may follow `path`, where it was asked
        self.passed: set[int] = set()  # tokens of which it is known without
        self.unmasked = 0  # questions since there were bits
        self.aside: list[tuple[LLMatcher, list[int]]] = []  # copies, with their paths
        self.endings = grammar.endings.anew()

    def permits(self, output: Sequence[int]) -> bool:
        kept = self._turn(output)
        for token in output[kept:]:
            # The bits are looked at first. They are needed anyway: llguidance limits the work
            # between two such calls, and one matcher beyond the limit takes all its copies along.
            # So tokens that passed alone are few.
            if token not in self.passed and not self._allows(token):
                return False
            self.matcher.consume_token(token)
            self._check()
            self.path.append(token)
            self._moved()
        return True

    def may_follow(self, output: Sequence[int], token: int) -> bool:
        """Whether an allowed text goes on with this token, mostly without the mask of all."""
        if token in self.grammar.ends or not self.permits(output):
            return False
        if self.bits is not None or self.unmasked >= UNMASKED:
            return self._allows(token)
        self.unmasked += 1
        passes = token < self.grammar.vocab and bool(self.matcher.validate_tokens([token]))
        if passes:
            forced = self.matcher.compute_ff_tokens()
            passes = not forced or forced[0] == token
        self._check()
        if passes:
            self.passed.add(token)
        return passes

    def _turn(self, output: Sequence[int]) -> int:
        """Goes to where `path` and `output` part; returns how many tokens that are."""
        kept = common(self.path, list(output))
        if len(self.path) - kept > FAR:
            here = self.matcher, list(self.path)
            reach = [common(path, list(output)) for _, path in self.aside]
            if reach and max(reach) > kept:
                kept = max(reach)
                self.matcher, self.path = self.aside.pop(reach.index(kept))
                self._moved()
            else:
                self.matcher = self.matcher.deep_copy()
            self.aside = [*self.aside[1 - ASIDE :], here]
        if kept < len(self.path):
            self.matcher.rollback(len(self.path) - kept)
            del self.path[kept:]
            self._moved()
        return kept

    def _moved(self) -> None:
        """Forgets what was known of the tokens after another path."""
        self.bits = None
        self.passed = set()

    def _allows(self, token: int) -> bool:
        bits = self._following()
        allowed = token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)
        return allowed and token not in self.grammar.ends

    def whole(self, output: Sequence[int]) -> bool:
        return self.permits(output) and bool(self.matcher.is_accepting())

    def allowed(self, output: Sequence[int]) -> torch.Tensor:
        if not self.permits(output):
            return torch.zeros(self.grammar.vocab, dtype=torch.bool)
        bits = np.frombuffer(self._following(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little", count=self.grammar.vocab)
        mask[self.grammar.ends] = 0
        return torch.from_numpy(mask.view(np.bool_))

    def _following(self) -> bytes:
        """A bit for each token that may follow `path`."""
        if self.bits is None:
            if len(self.matcher.compute_ff_bytes()) > FORCED:
                raise self._gave_up(f"more than {FORCED} bytes without a choice")
            self.bits = self.matcher.compute_bitmask()
            self.unmasked = 0
            self._check()
        return self.bits

    def forced(self, output: Sequence[int]) -> list[int]:
        return self.matcher.compute_ff_tokens() if self.permits(output) else []

    def ending(self, output: Sequence[int]) -> list[int] | None:
        return self.endings.after(output)

    def ends_within(self, output: Sequence[int], token: int, room: int) -> bool:
        return self.endings.within(output, token, room)

    def _check(self) -> None:
        """Raises BadConfig where the grammar became too large to go on in."""
        if self.matcher.is_error():
            self.grammar.usable = False
            raise self._gave_up(self.matcher.get_error().splitlines()[0])

    def _gave_up(self, reason: str) -> BadConfig:
        place = f"after {len(self.path)} tokens"
        return BadConfig(f"{self.grammar.name}: gave up {place} ({reason}); simplify it")
