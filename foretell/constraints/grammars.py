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

from foretell.constraints.compiling import add_distinctness, build_grammar, form_text
from foretell.constraints.grammar_trials import TRIALS
from foretell.errors import BadConfig, Unsupported, first_message_line
from foretell.models.gguf.vocabulary import Vocabulary
from foretell.ops.common_prefix import shared_prefix_length

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

    from foretell.constraints.ending_tokens import Endings, Spellings
    from foretell.constraints.endings import Alphabet

LARGEST = 2**18  # bytes of a form
SECONDS = 5.0  # that trying one may take
COMPILING = 1.0  # seconds of them for compiling it, which is done again
FORCED_BYTES = 2**13  # bytes that follow for lack of a choice: a mask spells them all
KEPT = 64  # compiled forms of a tokenizer
USES = 256  # of a compiled form: what its matchers note of texts, for all of them, only grows
UNMASKED = 8  # questions about single tokens between two masks: see Matcher.may_follow
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

    def compile_form(
        self, form: Mapping[str, Any], tenant: str = "", deadline: float = math.inf
    ) -> Grammar:
        """The constraint of a form: json_schema, regex or grammar, and what it is.

        `tenant`: who asks; `deadline`: by time.perf_counter(), when nobody waits for it any longer.
        Raises BadConfig for a form that cannot be used or takes too much, Unsupported without
        llguidance or a tokenizer that can be read, DeadlineExceeded.
        """
        [(form_kind, value)] = form.items()
        if self.tokenizer is None:
            raise Unsupported(
                f"{form_kind}: this model has no tokenizer, so its tokens have no text; "
                "give a folder that has tokenizer files"
            )
        form_source = form_text(form_kind, value)
        form_key = tenant, form_kind, form_source
        with self._lock:
            known_grammar = self._compiled.get(form_key)
            if known_grammar is not None and known_grammar.usable and known_grammar.uses < USES:
                known_grammar.uses += 1
                self._compiled.move_to_end(form_key)
                return known_grammar
        grammar = self._compile_new(form_kind, form_source, tenant, deadline)
        start_matcher = grammar.matcher.deep_copy()
        start_matcher.compute_bitmask()
        matches_nothing = start_matcher.is_error() and start_matcher.get_error().startswith(
            "NoExtension"
        )
        if matches_nothing or not grammar.track().allowed(()).any():
            raise BadConfig(
                f"{form_kind}: no text, or an empty one alone, has this form; change it"
            )
        with self._lock:
            self._compiled[form_key] = grammar
            self._compiled.move_to_end(form_key)
            while len(self._compiled) > KEPT:
                self._forget_oldest()
        return grammar

    def _forget_oldest(self) -> None:
        """Drops the form that was unused for longest, of the tenant that has the most forms."""
        form_counts = Counter(tenant for tenant, *_ in self._compiled)
        max_forms = max(form_counts.values())
        del self._compiled[next(key for key in self._compiled if form_counts[key[0]] == max_forms)]

    def _compile_new(
        self, form_kind: str, form_source: str, tenant: str, deadline: float
    ) -> Grammar:
        """Tries a form and compiles it. Raises as `compile_form` does."""
        source_size = len(form_source.encode())
        if source_size > LARGEST:
            raise BadConfig(
                f"{form_kind}: it has {source_size} bytes, at most {LARGEST} are read; shorten it"
            )
        with self._reading:
            llguidance_tokens, alphabet, spellings = (
                self._llguidance_tokens,
                self._byte_alphabet,
                self._token_spellings,
            )
        from llguidance import LLMatcher

        from foretell.constraints.ending_tokens import Endings
        from foretell.constraints.endings import Search

        trial_question = {
            "name": form_kind,
            "source": form_source,
            "vocab": alphabet.vocab,
            "specials": alphabet.specials,
            "end": alphabet.end,
        }
        trial_answer = TRIALS.ask_process(trial_question, tenant, SECONDS, deadline)
        if "refused" in trial_answer:
            raise BadConfig(trial_answer["refused"])
        if trial_answer["seconds"] > COMPILING:
            raise BadConfig(f"{form_kind}: it takes too long to compile; simplify it")
        grammar_text = build_grammar(form_kind, trial_answer["source"])
        matcher, ending_matcher = (
            add_distinctness(
                LLMatcher(llguidance_tokens, grammar_text, log_level=0),
                form_kind,
                trial_answer["source"],
                spellings.pieces,
            )
            for _ in range(2)
        )
        ending_search = Search(alphabet, form_kind, trial_answer["source"])
        ending_search.parts = trial_answer["parts"]
        endings = Endings.begin_endings(
            ending_search,
            spellings,
            ending_matcher,
            ending_search.start_matcher(),
            trial_answer["ending"],
        )
        return Grammar(matcher, form_kind, self.vocab, self._end_tokens(), endings)

    @cached_property
    def _llguidance_tokens(self) -> LLTokenizer:
        """The tokenizer in llguidance's form, which takes part of a second to make."""
        try:
            from llguidance import hf
        except ImportError as error:
            raise Unsupported(
                "json_schema, regex and grammar need the package llguidance: "
                "pip install 'foretell[constrain]'"
            ) from error
        tokenizer: Any = self.tokenizer
        end_tokens: Any = self.eos or None  # None: the tokenizer's own
        try:
            if isinstance(tokenizer, Vocabulary):
                return tokenizer.for_forms(max(self.vocab, len(tokenizer)), end_tokens)
            return hf.from_tokenizer(tokenizer, max(self.vocab, len(tokenizer)), end_tokens)
        except Exception as error:  # a tokenizer that is not a fast one, or an unusual one
            raise Unsupported(
                f"json_schema, regex and grammar cannot read this model's tokenizer "
                f"({first_message_line(error)}); leave them out, or load a model whose "
                "tokenizer.json has a byte-level decoder"
            ) from error

    @cached_property
    def _byte_alphabet(self) -> Alphabet:
        """The alphabet that endings are searched in."""
        from foretell.constraints.endings import Alphabet

        llguidance_tokens: Any = self._llguidance_tokens
        tokenizer: Any = self.tokenizer
        special_names = {}
        for token in range(min(llguidance_tokens.vocab_size, len(tokenizer))):
            if llguidance_tokens.is_special_token(token):
                special_names[token] = str(tokenizer.convert_ids_to_tokens(token))
        return Alphabet(llguidance_tokens.vocab_size, special_names, llguidance_tokens.eos_token)

    @cached_property
    def _token_spellings(self) -> Spellings:
        """The bytes of the tokens; specials have none. Takes some 50 ms to make."""
        from foretell.constraints.ending_tokens import Spellings

        llguidance_tokens = self._llguidance_tokens
        return Spellings(
            [
                b""
                if llguidance_tokens.is_special_token(token)
                else llguidance_tokens.decode_bytes([token])
                for token in range(self.vocab)
            ]
        )

    def _end_tokens(self) -> list[int]:
        """The ids that stand for an end with llguidance."""
        return [token for token in self._llguidance_tokens.eos_tokens if token < self.vocab]


class Grammar:
    """A compiled form; a Constraint."""

    def __init__(
        self, matcher: LLMatcher, name: str, vocab: int, ends: Sequence[int], endings: Endings
    ):
        """`matcher`: at the beginning, where it stays, as `endings` does; `name`: the argument's
        name, for errors.
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
    """The place of one branch in a grammar; a Tracker.

    It follows the output it was last asked about, `path`, and goes from there to the next
    one: back to where they part, then on. Where that is far, as with texts that are written side by
    side, a copy stays. Where a form leaves no choice of characters, llguidance allows the tokens
    alone that the tokenizer would write them with.
    """

    def __init__(self, grammar: Grammar):
        self.grammar = grammar
        self.matcher = grammar.matcher.deep_copy()
        self.path: list[int] = []
        self.bits: bytes | None = None  # of the tokens that may follow `path`, where it was asked
        self.passed_tokens: set[int] = set()  # tokens of which it is known without
        self.unmasked = 0  # questions since there were bits
        self.saved_copies: list[tuple[LLMatcher, list[int]]] = []  # copies, with their paths
        self.endings = grammar.endings.copy_for_branch()

    def permits(self, output: Sequence[int]) -> bool:
        shared_count = self._rewind_to(output)
        for token in output[shared_count:]:
            # The bits are looked at first. They are needed anyway: llguidance limits the work
            # between two such calls, and one matcher beyond the limit takes all its copies along.
            # So tokens that passed alone are few.
            if token not in self.passed_tokens and not self._allows_token(token):
                return False
            self.matcher.consume_token(token)
            self._check_matcher()
            self.path.append(token)
            self._forget_following()
        return True

    def may_follow(self, output: Sequence[int], token: int) -> bool:
        """Whether an allowed text goes on with this token, mostly without the mask of all."""
        if token in self.grammar.ends or not self.permits(output):
            return False
        if self.bits is not None or self.unmasked >= UNMASKED:
            return self._allows_token(token)
        self.unmasked += 1
        token_passes = token < self.grammar.vocab and bool(self.matcher.validate_tokens([token]))
        if token_passes:
            forced_tokens = self.matcher.compute_ff_tokens()
            token_passes = not forced_tokens or forced_tokens[0] == token
        self._check_matcher()
        if token_passes:
            self.passed_tokens.add(token)
        return token_passes

    def _rewind_to(self, output: Sequence[int]) -> int:
        """Goes to where `path` and `output` part; returns how many tokens they share."""
        shared_count = shared_prefix_length(self.path, list(output))
        if len(self.path) - shared_count > FAR:
            current_copy = self.matcher, list(self.path)
            shared_lengths = [
                shared_prefix_length(saved_path, list(output))
                for _, saved_path in self.saved_copies
            ]
            if shared_lengths and max(shared_lengths) > shared_count:
                shared_count = max(shared_lengths)
                self.matcher, self.path = self.saved_copies.pop(shared_lengths.index(shared_count))
                self._forget_following()
            else:
                self.matcher = self.matcher.deep_copy()
            self.saved_copies = [*self.saved_copies[1 - ASIDE :], current_copy]
        if shared_count < len(self.path):
            self.matcher.rollback(len(self.path) - shared_count)
            del self.path[shared_count:]
            self._forget_following()
        return shared_count

    def _forget_following(self) -> None:
        """Forgets which tokens may follow, which was known of another path."""
        self.bits = None
        self.passed_tokens = set()

    def _allows_token(self, token: int) -> bool:
        following_bits = self._following_bits()
        is_allowed = token >> 3 < len(following_bits) and bool(
            following_bits[token >> 3] >> (token & 7) & 1
        )
        return is_allowed and token not in self.grammar.ends

    def whole(self, output: Sequence[int]) -> bool:
        return self.permits(output) and bool(self.matcher.is_accepting())

    def allowed(self, output: Sequence[int]) -> torch.Tensor:
        if not self.permits(output):
            return torch.zeros(self.grammar.vocab, dtype=torch.bool)
        following_bits = np.frombuffer(self._following_bits(), np.uint8)
        token_mask = np.unpackbits(following_bits, bitorder="little", count=self.grammar.vocab)
        token_mask[self.grammar.ends] = 0
        return torch.from_numpy(token_mask.view(np.bool_))

    def _following_bits(self) -> bytes:
        """A bit for each token that may follow `path`."""
        if self.bits is None:
            if len(self.matcher.compute_ff_bytes()) > FORCED_BYTES:
                raise self._give_up(f"more than {FORCED_BYTES} bytes without a choice")
            self.bits = self.matcher.compute_bitmask()
            self.unmasked = 0
            self._check_matcher()
        return self.bits

    def forced(self, output: Sequence[int]) -> list[int]:
        return self.matcher.compute_ff_tokens() if self.permits(output) else []

    def ending(self, output: Sequence[int]) -> list[int] | None:
        return self.endings.ending_after(output)

    def ends_within(self, output: Sequence[int], token: int, room: int) -> bool:
        return self.endings.ends_within(output, token, room)

    def _check_matcher(self) -> None:
        """Raises BadConfig where the grammar became too large to go on in."""
        if self.matcher.is_error():
            self.grammar.usable = False
            raise self._give_up(self.matcher.get_error().splitlines()[0])

    def _give_up(self, reason: str) -> BadConfig:
        location = f"after {len(self.path)} tokens"
        return BadConfig(f"{self.grammar.name}: gave up {location} ({reason}); simplify it")
