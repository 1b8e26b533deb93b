"""The protocols of constrained decoding: which tokens of a text may follow which.

What a user gives, a form (schema, regular expression, grammar) or a constraint, becomes a
`Constraint`; its `track` makes a `Tracker` of one text (`grammars.Matcher`), and a `Guide` adds
stops and the room that is left to it.

A constraint may be anything that has the two protocols here; foretell.constraints.grammars makes
them of JSON schemas, regular expressions and grammars, and a `TextConstraint`, which is a method,
makes them for a prompt. A constraint is a function of the path: the text of every node of a tree is
asked for by its tokens, in any order, so it holds inside drafts as it does in plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, Protocol

from foretell.core.settings import Settings
from foretell.errors import BadConfig

if TYPE_CHECKING:
    import torch

AHEAD = 256  # tokens of room beside those of the shortest text, above which nothing is looked at
MARGIN = 32  # tokens of room beside an ending, below which it is seen to that the text can end
LOOKED_AT = 64  # tokens at one place then, the best ones
TEXT = "a text that is not empty"
FORMS: dict[str, tuple[Any, str]] = {  # what the form of a text may be given by
    "json_schema": ((Mapping, str, bool), "True, or a JSON schema as a mapping or a text"),
    "regex": (str, TEXT),
    "grammar": (str, TEXT),
}


class Tracker(Protocol):
    """A constraint as one branch asks it: about outputs that mostly differ in a few last tokens.

    The tokens that end a text are not of its form and never stand in an `output`.
    """

    def permits(self, output: Sequence[int]) -> bool:
        """Whether an allowed text begins with these tokens."""

    def whole(self, output: Sequence[int]) -> bool:
        """Whether they are an allowed text."""

    def allowed(self, output: Sequence[int]) -> torch.Tensor:
        """Bool (V,), new each time: the tokens that may follow, ends of the text left aside."""

    def forced(self, output: Sequence[int]) -> list[int]:
        """Tokens that follow for lack of a choice; none where there may be one."""


class Constraint(Protocol):
    """Which texts are allowed. Requests share it."""

    def track(self) -> Tracker:
        """Returns the tracker that one branch asks."""


class EndingTracker(Tracker, Protocol):
    """A tracker that knows how its texts may end, so that they do before their length runs out."""

    def ending(self, output: Sequence[int]) -> Sequence[int] | None:
        """Tokens that make an allowed text of these, as few as it finds; None: it finds none."""

    def ends_within(self, output: Sequence[int], token: int, room: int) -> bool:
        """Whether it finds an ending of at most `room` tokens after `output` and a token."""


class AskingTracker(Tracker, Protocol):
    """A tracker that has to ask outside of the engine what may follow, which takes long.

    Its other functions wait where they lack an answer, so asking ahead changes no token.
    """

    endless: bool  # whether something may follow every text, so that none is complete

    def unknown(self, outputs: Sequence[Sequence[int]]) -> Callable[[], None] | None:
        """Returns a function that asks for all missing answers about these outputs, to be
        called on any thread; None: there are none.
        """

    def knows(self, output: Sequence[int]) -> bool:
        """Whether `permits(output)` waits for nothing."""


class Pieces(Protocol):
    """A tokenizer as the bytes of its tokens: core.tokenizer_bytes.Words."""

    def piece(self, token: int) -> bytes | None:
        """The bytes of a token; None: it has none."""

    def text(self, tokens: Iterable[int]) -> bytes:
        """The bytes of tokens, one after the other."""


@dataclass(frozen=True)
class Prompted:
    """Facts about a text that its constraint may use.

    `words`: the bytes of the model's tokens, `vocab` of them; `kept`: what the constraints of one
    model share, by keys of their own.
    """

    prompt: tuple[int, ...]
    words: Pieces
    vocab: int
    kept: MutableMapping[Any, Any]


class TextConstraint(Settings):
    """The base of a constraint that is a method: a frozen dataclass of hyper-parameters."""

    kind = "constraint"

    def on(self, prompted: Prompted) -> Constraint:
        """Returns the constraint of a text after this prompt. Raises BadConfig or Unsupported."""
        raise NotImplementedError


def form_of(sampling: Any) -> dict[str, Any]:
    """Which form a Sampling gives, and as what: one of json_schema, regex and grammar, or none."""
    form_options = {name: getattr(sampling, name) for name in FORMS}
    return {name: value for name, value in form_options.items() if value is not None}


def check_form(
    form: Mapping[str, Any], constraint: Constraint | TextConstraint | None, ignore_eos: bool
) -> None:
    """Raises BadConfig where the form of a text is given twice, or by something else."""
    for name, value in form.items():
        value_type, expected_form = FORMS[name]
        if not isinstance(value, value_type) or (not value and not isinstance(value, Mapping)):
            raise BadConfig.field(name, value, expected_form)
    if len(form) > 1:
        raise BadConfig(f"{' and '.join(form)}: a text has one form; give one of them")
    ends = form or not (constraint is None or getattr(constraint, "endless", False))
    if ignore_eos and ends:
        raise BadConfig("ignore_eos: a text whose form is given ends with it; leave one out")


def guide_of(
    form: Mapping[str, Any],
    constraint: Constraint | TextConstraint | None,
    stops: Collection[int],
    longest: float,
) -> Guide | None:
    """The guide of one branch; None: its text is free.

    Raises BadConfig for a form of which no constraint was made, since that takes a tokenizer.
    """
    if isinstance(constraint, TextConstraint):
        form = {"constraint": constraint}
    elif constraint is not None:
        return Guide(constraint.track(), stops, longest)
    for name in form:
        raise BadConfig(f"{name}: only LM.generate, which has a tokenizer, takes it")
    return None


class Guide:
    """The constraint of one branch, the tokens that end its text, `stops`, and how many tokens it
    may have, `longest`.

    Where a text is about to reach that length, only tokens may follow after which an ending still
    fits, if the tracker is an EndingTracker and finds one. Nothing is looked at before `longest` is
    near, so that a text may still be cut where one token asks for an ending of more than MARGIN
    others, or one that is AHEAD longer than the shortest text.
    """

    def __init__(self, tracker: Tracker, stops: Collection[int], longest: float = math.inf):
        self.tracker = tracker
        self.stops = list(stops)
        self.longest = longest
        self.ending = getattr(tracker, "ending", None)

    def permits(self, output: Sequence[int]) -> bool:
        """Whether an allowed text begins with these tokens, the last of which may end it."""
        if output[-1] in self.stops and self.tracker.whole(output[:-1]):
            return True
        return self.tracker.permits(output)

    def may_follow(self, output: Sequence[int], token: int) -> bool:
        """Whether `token` may follow an output that is permitted.

        A tracker may have a method `may_follow` of its own, for whom that is less work.
        """
        if token in self.stops and self.tracker.whole(output):
            return True
        quick_check: Callable[[Sequence[int], int], bool] | None
        quick_check = getattr(self.tracker, "may_follow", None)
        follows = (
            self.tracker.permits([*output, token])
            if quick_check is None
            else quick_check(output, token)
        )
        return follows and (self._find_ending(output) is None or self._in_time(output, token))

    def may_draft(self, output: Sequence[int]) -> bool:
        """Whether drafts may hold this output: `permits`, or True where that takes long to know."""
        knows = getattr(self.tracker, "knows", None)
        return (knows is not None and not knows(output)) or self.permits(output)

    def complete(self, output: Sequence[int]) -> bool:
        """Whether nothing can follow but an end.

        Raises BadConfig where the text is not allowed: it was accepted against the constraint.
        """
        if not self.tracker.permits(output):
            raise BadConfig(
                "the method accepted a text that is not of the given form; "
                "choose another method or rule"
            )
        if getattr(self.tracker, "endless", False):
            return False
        return self.tracker.whole(output) and not bool(self.tracker.allowed(output).any())

    def may_end(self, output: Sequence[int]) -> bool:
        """Whether the text may end here, if it is of a form that ends."""
        return not getattr(self.tracker, "endless", False) and self.tracker.whole(output)

    def masked(
        self, scores: torch.Tensor, output: Sequence[int], only_best: bool = False
    ) -> torch.Tensor:
        """Scores (V,) of the tokens after `output`, -inf for those that may not follow.

        Tokens that end a text may follow where it may end, and only there. `only_best`: nobody
        looks at other tokens than the best one.
        """
        from foretell.ops import logits as rows

        allowed_tokens = self.tracker.allowed(output)
        if self.tracker.whole(output):
            allowed_tokens[self.stops] = True
        scores = rows.mask_scores(scores, allowed_tokens)
        ending = self._find_ending(output)
        return scores if ending is None else self._in_time_only(scores, output, ending, only_best)

    def forced(self, output: Sequence[int]) -> list[int]:
        """Tokens that follow for lack of a choice, or of room for much else; none otherwise."""
        forced = self.tracker.forced(output)
        ending = None if forced else self._find_ending(output)
        if ending is not None and len(ending) == self.longest - len(output):
            return list(ending)
        return forced

    def _find_ending(self, output: Sequence[int]) -> Sequence[int] | None:
        """The ending of a text whose length runs out; None: it goes on freely, or finds none."""
        if self.ending is None or self.longest - len(output) > AHEAD + len(self.ending(()) or ()):
            return None
        ending: Sequence[int] | None = self.ending(output)
        if ending is None:
            return None
        spare = self.longest - len(output) - len(ending)
        return ending if 0 <= spare <= MARGIN else None

    def _in_time(self, output: Sequence[int], token: int) -> bool:
        """Whether the text can be whole in time after `output` and a token that may follow."""
        if token in self.stops and self.tracker.whole(output):
            return True
        tracker: Any = self.tracker
        return bool(tracker.ends_within(output, token, int(self.longest) - len(output) - 1))

    def _in_time_only(
        self, scores: torch.Tensor, output: Sequence[int], ending: Sequence[int], only_best: bool
    ) -> torch.Tensor:
        """The scores of the tokens after which the text can end in time, of the LOOKED_AT best
        ones or the best alone, and what comes next in `ending`; all where these have no chance.
        """
        best_scores, best_ids = (part.tolist() for part in scores.topk(min(LOOKED_AT, len(scores))))
        tried_tokens = [
            token for _, token in sorted(zip([-x for x in best_scores], best_ids, strict=True))
        ]
        tried_tokens = [*dict.fromkeys([*tried_tokens, *(ending[:1] or self.stops)])]
        possible = (scores[tried_tokens] > -math.inf).tolist()
        fitting = (
            token for token in compress(tried_tokens, possible) if self._in_time(output, token)
        )
        fitting_tokens = sorted(islice(fitting, 1 if only_best else None))
        if not fitting_tokens:
            return scores
        limited_scores = scores.new_full(scores.shape, -math.inf)
        limited_scores[fitting_tokens] = scores[fitting_tokens]
        return limited_scores
