"""What a served draft model learns while it serves: lessons, and the updates made of them.

Verification tells the target's laws anyway, so a finished response is a lesson for free. A learner
gathers some and orders an update, which the next request that drafts makes, outside the engine's
thread. A request keeps the weights of the last update that was ordered when it began: which weights
it has depends on what ended before it, never on how long an update took.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.types import Call, Message
from foretell.ops.translated import Translated
from foretell.ops.words import Shared

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.drafter import Feedback

MERGED = 0.2  # weight of a token that several of theirs write
KEPT = 64  # likeliest shared tokens of the target's law; all others are one
WINDOW = 1024  # tokens of a lesson, the last ones of its text
LEAST = 1e-6  # probability that is told from 0


@dataclass
class Lesson:
    """A text in the draft model's tokens, and what the target said of it.

    `direct`: places of tokens that both have, with the target's likeliest `tokens` there, in their
    ids, and its `chances` of them; `merged`: spans of places that write one token of ours.
    """

    ids: list[int]
    direct: list[int]
    tokens: torch.Tensor  # (direct, K)
    chances: torch.Tensor  # (direct, K)
    merged: list[tuple[int, int]]

    @property
    def size(self) -> int:
        """Tokens of ours that it is about."""
        return len(self.direct) + len(self.merged)

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Of rows (L, V') behind each of `ids`, in nats, summed over tokens of ours."""
        laws = logits.float().log_softmax(-1)
        loss = laws.new_zeros(())
        if self.direct:
            rows = laws[[place - 1 for place in self.direct]]
            loss = loss + divergence(rows.gather(1, self.tokens), self.chances).sum()
        for start, end in self.merged:
            places = torch.arange(start, end)
            loss = loss - MERGED * laws[places - 1, torch.tensor(self.ids[start:end])].sum()
        return loss


def divergence(own: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """D(q || p) (n,) of a draft's laws from the target's: log q of some tokens (n, K), and their
    chances in p (n, K). All other tokens count as one.
    """
    q = own.exp()
    rest = (1 - q.sum(-1)).clamp_min(LEAST)
    p_rest = (1 - chances.sum(-1)).clamp_min(LEAST)
    told = (q * (own - chances.clamp_min(LEAST).log())).sum(-1)
    return told + rest * (rest.log() - p_rest.log())


def lesson_of(
    translated: Translated,
    shared: Shared,
    tokens: Sequence[int],
    laws: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Lesson | None:
    """Of a text whose last tokens had these laws (ids of theirs, chances); None: it has nothing.

    Bytes tell which tokens of the two stand in the same place.
    """
    ids = translated.ids
    places: dict[int, list[int]] = {}  # by the byte that they begin with
    end = 0
    for place, token in enumerate(ids):
        places.setdefault(end, []).append(place)
        end += len(translated.theirs.piece(token) or b"")
    places.setdefault(end, []).append(len(ids))
    end += len(translated.pending)
    first = max(0, len(ids) - WINDOW)
    direct: list[int] = []
    known: list[tuple[torch.Tensor, torch.Tensor]] = []
    merged: list[tuple[int, int]] = []
    for back in range(1, len(laws) + 1):
        token = tokens[-back]
        start = end - translated.bytes_of(token, len(tokens) - back)
        partner = shared.partner.get(token)
        here = [place for place in places.get(start, ()) if place > first]
        same = [place for place in here if place < len(ids) and ids[place] == partner]
        if partner is not None and same:
            direct.append(same[-1] - first)
            known.append(laws[-back])
        elif partner is None and here and end in places and here[-1] + 1 < places[end][0]:
            merged.append((here[-1] - first, places[end][0] - first))
        end = start
    if not direct and not merged:
        return None
    width = max((len(found) for found, _ in known), default=0)
    found = torch.stack([found for found, _ in known]) if known else torch.zeros(0, width)
    chances = torch.stack([chance for _, chance in known]) if known else torch.zeros(0, width)
    return Lesson(list(ids[first:]), direct, found.long(), chances, merged)


class Update:
    """Weights that are made of lessons when they are first asked for, or have been made."""

    def __init__(self, learner: Learner, before: Update | None, lessons: list[Lesson]):
        self.learner = learner
        self.before = before
        self.lessons = lessons
        self.asked = before is None
        self.value: Any = None  # None: the weights that were there in the beginning

    def weights(self) -> Any:
        """Makes them, once. What the learning raises is raised to one caller; the weights before
        the update then hold on.
        """
        with self.learner.lock:
            if self.before is not None:
                self.value = self.before.weights()
                lessons, self.lessons, self.before = self.lessons, [], None
                self.value = self.learner.learn(lessons)
            return self.value


class Learner:
    """One tenant's. An update is ordered for each `every` lessons; `learn` makes its weights, each
    time from those that it made last.
    """

    def __init__(self, every: int, learn: Callable[[Sequence[Lesson]], Any]):
        self.every = every
        self.learn = learn
        self.lessons: deque[Lesson] = deque(maxlen=every)
        self.last = Update(self, None, [])
        self.lock = threading.RLock()

    def take(self, lesson: Lesson) -> None:
        """While no request has asked for the last update, only the newest lessons are kept."""
        self.lessons.append(lesson)
        if len(self.lessons) == self.every and self.last.asked:
            self.last = Update(self, self.last, list(self.lessons))
            self.lessons.clear()


@dataclass
class Study:
    """One request's part in it: the weights it drafts with, and the laws it has seen."""

    learner: Learner
    update: Update
    begun: bool = False
    laws: deque[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=lambda: deque(maxlen=WINDOW)
    )

    def begin(self, ctx: Context, name: str = "draft") -> Generator[Message, Any, None]:
        """Before its first draft: gives the request its weights, which may have to be made."""
        if self.begun:
            return
        self.begun = True
        self.update.asked = True
        weights = yield Call(self.update.weights)
        model: Any = ctx.models[name]
        model.begin(ctx.request, weights)

    def observe(self, ctx: Context, translated: Translated, shared: Shared, step: Feedback) -> None:
        """Notes the target's laws; the end of the text makes them a lesson."""
        nodes = [0, *step.outcome.path][: len(step.tokens)]
        laws = step.reply.logits[nodes].float().softmax(-1)
        chances, which = laws[:, shared.ours.to(laws.device)].topk(min(KEPT, len(shared.ours)))
        theirs = shared.theirs[which.cpu()]
        self.laws.extend(zip(theirs, chances.cpu(), strict=True))
        if ctx.branches[ctx.branch].reason is None:
            return
        translated.update(ctx.tokens)
        lesson = lesson_of(translated, shared, ctx.tokens, list(self.laws))
        if lesson is not None:
            self.learner.take(lesson)
