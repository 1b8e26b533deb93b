"""Options of a request: how its tokens are chosen, and where its text stops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from foretell.core.constraint import Constraint, TextConstraint, check_form, form_of
from foretell.core.penalties import Biased, Copying, Counted, Held
from foretell.core.processor import About, Processor
from foretell.core.text import whole_text
from foretell.errors import BadConfig


@runtime_checkable
class Text(Protocol):
    """A text that must not come out: api.unsaid.Unsaid."""

    def make_processor(self, prompt: int) -> Any:
        """A processor for the output after so many tokens."""


ANSWER_TOKENS = 512  # of an answer at most: a whole one, in general
CANVAS_TOKENS = 256  # the same of a canvas, all of which every forward computes


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to stop.

    Every field is a function of the path, so that it holds inside drafts too.
    """

    max_new_tokens: int = ANSWER_TOKENS
    min_new_tokens: int = 0
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and output, multiplicative
    presence_penalty: float = 0.0  # over the output, additive
    frequency_penalty: float = 0.0  # over the output, per occurrence
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int] | Text] = ()  # token ids, or texts
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = 0  # None: drawn at random, and no tokens are promised to come again
    n: int = 1
    # None: none; k: the emitted token's and the k best, of the unprocessed row
    logprobs: int | None = None
    # transformers' (input_ids (1, L), scores (1, V)) -> scores
    logits_processors: Sequence[Any] = ()
    processor: Sequence[Processor] = ()  # after the user's own
    json_schema: Mapping[str, Any] | str | bool | None = None  # True: any JSON value
    regex: str | None = None  # of the whole text
    grammar: str | None = None  # in llguidance's form of Lark
    # What one of these three became, or another one: a method's, or the user's own.
    constraint: Constraint | TextConstraint | None = None

    def __post_init__(self) -> None:
        for name, (value_type, min_value, max_value) in _RANGES.items():
            value = getattr(self, name)
            if name in ("logprobs", "seed") and value is None:
                continue
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            right_type = is_whole or (value_type is float and isinstance(value, float))
            if not right_type or not min_value <= value <= max_value:
                number = "a whole number" if value_type is int else "a number"
                up_to = f" to {max_value}" if max_value < HUGE else ""
                raise BadConfig.field(name, value, f"{number} from {min_value}{up_to}")
        if self.min_new_tokens > self.max_new_tokens:
            raise BadConfig(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens="
                f"{self.max_new_tokens}: lower the one or raise the other"
            )
        for name, item_types in (("stop", str), ("bad_words", (list, tuple, Text))):
            items = getattr(self, name)
            if not all(isinstance(item, item_types) and item for item in items):
                raise BadConfig.field(name, items, "a list without empty items")
        for stop in self.stop:
            whole_text("stop", stop)
        if not isinstance(self.processor, tuple) or not all(
            isinstance(w, Processor) for w in self.processor
        ):
            raise BadConfig.field("processor", self.processor, "a tuple of processors")
        check_form(form_of(self), self.constraint, self.ignore_eos)

    def path_processors(
        self,
        prompt: Sequence[int],
        ends: Collection[int],
        text: Callable[[Sequence[int]], str] | None,
    ) -> list[Any]:
        """The user's processors, ours, and what the output's tokens lose and gain, for one branch,
        in their order. Raises BadConfig.
        """
        metadata = About(len(prompt), ends, text)
        texts = [word for word in self.bad_words if isinstance(word, Text)]
        processors: list[Any] = [text.make_processor(len(prompt)) for text in texts]
        processors += [Copying(processor) for processor in self.logits_processors]
        processors += [
            processor.start_track(metadata) for processor in self.processor if not processor.off
        ]
        if self.presence_penalty or self.frequency_penalty:
            processors.append(Counted(len(prompt), self.presence_penalty, self.frequency_penalty))
        if self.logit_bias:
            processors.append(Biased(self.logit_bias))
        if self.min_new_tokens and ends:
            processors.append(Held(len(prompt) + self.min_new_tokens, ends))
        return processors


HUGE = 2**62
_RANGES: dict[str, tuple[type, float, float]] = {
    "max_new_tokens": (int, 0, HUGE),
    "min_new_tokens": (int, 0, HUGE),
    "temperature": (float, 0, 100),
    "top_k": (int, 0, HUGE),
    "top_p": (float, 1e-6, 1),
    "min_p": (float, 0, 1),
    "typical_p": (float, 1e-6, 1),
    "repetition_penalty": (float, 0.001, 100),
    "presence_penalty": (float, -100, 100),
    "frequency_penalty": (float, -100, 100),
    "no_repeat_ngram_size": (int, 0, HUGE),
    "seed": (int, -HUGE, HUGE),
    "n": (int, 1, 4096),
    "logprobs": (int, 0, HUGE),
}
