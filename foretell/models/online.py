"""What a served draft model learns while it serves: lessons, and the updates made of them.

Verification tells the target's laws anyway, so a finished response is a lesson for free. A learner
gathers some and orders an update, which the next request that drafts makes, outside the engine's
thread. A request keeps the weights of the last update that was ordered when it began: which weights
it has depends on what ended before it, never on how long an update took.

    Study        of a draft model with another tokenizer (OmniDraft): all places of a text
    Corrections  of one with the target's tokens (Online Speculative Decoding): places where a draft
                 was tested
"""

from __future__ import annotations

import copy
import heapq
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tokenizer_bytes import Shared
from foretell.core.types import Call, Message
from foretell.errors import Unsupported
from foretell.models.translated import Translated

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.drafter import Feedback
    from foretell.core.model import Model

MERGED = 0.2  # weight of a token that several of theirs write
KEPT = 64  # likeliest shared tokens of the target's law; all others are one
WINDOW = 1024  # tokens of a lesson, the last ones of its text
PLACES = 64  # of a text, those where the draft was furthest from the target
LEFT_OUT = -1e30  # logarithm of the chance of a token that a trimmed model has no row for
LEAST = 1e-6  # probability that is told from 0


@dataclass
class Lesson:
    """A text in the draft model's tokens, and what the target said of it.

    `direct`: places of tokens that both have, with the target's likeliest `tokens` there, in their
    ids, and its `chances` of them; `merged`: spans of places that write one token of ours.
    `forward`: whether the divergence is the target's from the draft model, else the reverse.
    """

    ids: list[int]
    direct: list[int]
    tokens: torch.Tensor  # (direct, K)
    chances: torch.Tensor  # (direct, K)
    merged: list[tuple[int, int]]
    forward: bool = False

    @property
    def size(self) -> int:
        """Tokens of ours that it is about."""
        return len(self.direct) + len(self.merged)

    def loss(self, logits: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Of rows (L, V') behind each of `ids`, in nats, summed over tokens of ours.

        `kept` (V',): the tokens that the rows are of, in ascending order; None: all. Of the others
        nothing is learnt: the target's law is taken without them.
        """
        laws = logits.float().log_softmax(-1)
        loss = laws.new_zeros(())
        if self.direct:
            rows = laws[[place - 1 for place in self.direct]]
            own, chances = seen_by(rows, self.tokens, self.chances, kept)
            measure = forward_divergence if self.forward else divergence
            loss = loss + measure(own, chances).sum()
        for start, end in self.merged:
            places = torch.arange(start, end)
            ids = torch.tensor(self.ids[start:end])
            if kept is not None:
                if not bool(torch.isin(ids, kept).all()):
                    continue
                ids = torch.searchsorted(kept, ids)
            loss = loss - MERGED * laws[places - 1, ids].sum()
        return loss


def seen_by(
    rows: torch.Tensor, tokens: torch.Tensor, chances: torch.Tensor, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows (n, V') of log q say of tokens (n, K), and the target's chances of these (n, K)
    given that no token is left out.
    """
    if kept is None:
        return rows.gather(1, tokens), chances
    columns = torch.searchsorted(kept, tokens).clamp_max(len(kept) - 1)
    there = kept[columns] == tokens
    own = torch.where(there, rows.gather(1, columns), LEFT_OUT)
    lost = torch.where(there, 0.0, chances).sum(-1, keepdim=True)
    return own, torch.where(there, chances / (1 - lost).clamp_min(LEAST), 0.0)


def divergence(own: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """D(q || p) (n,) of a draft's laws from the target's: log q of some tokens (n, K), and their
    chances in p (n, K). All other tokens count as one.
    """
    q = own.exp()
    rest = (1 - q.sum(-1)).clamp_min(LEAST)
    p_rest = (1 - chances.sum(-1)).clamp_min(LEAST)
    told = (q * (own - chances.clamp_min(LEAST).log())).sum(-1)
    return told + rest * (rest.log() - p_rest.log())


def forward_divergence(own: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """D(p || q) (n,) of the target's laws from a draft's, of the same."""
    rest = (1 - own.exp().sum(-1)).clamp_min(LEAST)
    p_rest = (1 - chances.sum(-1)).clamp_min(LEAST)
    told = torch.where(chances > 0, chances * (chances.clamp_min(LEAST).log() - own), 0.0)
    return told.sum(-1) + p_rest * (p_rest.log() - rest.log())


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


def learning(method: str, models: Mapping[str, Model]) -> dict[str, Model]:
    """What a drafter brings whose draft model learns. Raises Unsupported where it cannot."""
    draft = models.get("draft")
    if draft is None:  # which is told of where models are looked for
        return {}
    make = getattr(draft, "learning", None)
    if make is None:
        need = "a draft model whose weights torch can train"
        cure = "load one by transformers, or set online=0"
        raise Unsupported.missing(f"{method}:online", draft.name, need, cure)
    return {"draft": make()}


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

    def copied(self, learner: Learner) -> Update:
        """The same for a copy of its learner. Weights never change, so that they are shared."""
        before = self.before and self.before.copied(learner)
        twin = Update(learner, before, list(self.lessons))
        twin.asked, twin.value = self.asked, self.value
        return twin


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

    def __deepcopy__(self, memo: dict[int, Any]) -> Learner:
        with self.lock:
            twin = Learner(self.every, copy.deepcopy(self.learn, memo))
            twin.lessons.extend(self.lessons)
            twin.last = self.last.copied(twin)
        return twin

    def take(self, lesson: Lesson) -> None:
        """While no request has asked for the last update, only the newest lessons are kept."""
        self.lessons.append(lesson)
        if len(self.lessons) == self.every and self.last.asked:
            self.last = Update(self, self.last, list(self.lessons))
            self.lessons.clear()


@dataclass
class Pupil:
    """One request's part in it: the weights it drafts with."""

    learner: Learner
    update: Update
    begun: bool = False

    def begin(self, ctx: Context, name: str = "draft") -> Generator[Message, Any, None]:
        """Before its first draft: gives the request its weights, which may have to be made."""
        if self.begun:
            return
        self.begun = True
        self.update.asked = True
        weights = yield Call(self.update.weights)
        model: Any = ctx.models[name]
        model.begin(ctx.request, weights)


@dataclass
class Study(Pupil):
    """Of a draft model with another tokenizer: all laws that its request has seen."""

    laws: deque[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=lambda: deque(maxlen=WINDOW)
    )

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


@dataclass
class Corrections(Pupil):
    """Of a draft model with the target's tokens: the laws where its tokens were tested.

    Source: Liu et al., "Online Speculative Decoding" (arXiv 2310.07177), algorithm 1. Of a text at
    most PLACES are kept. Those come first where the chances that draft model and target gave the
    drafted token differ most: no difference of the two laws in total variation is less than that.
    """

    # (that difference, minus the place in the text, the target's likeliest tokens, their chances)
    found: list[tuple[float, int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def observe(self, ctx: Context, vocab: int, step: Feedback) -> None:
        """Notes the target's laws over the draft model's `vocab` tokens; the end of the text makes
        them a lesson.
        """
        tree = step.tree
        nodes = [0, *step.outcome.path][: len(step.tokens)]
        tested = [(row, node) for row, node in enumerate(nodes) if tree.tries[node]]
        if tested:
            laws = step.reply.logits[[node for _, node in tested]].float().softmax(-1)
            chances, best = laws[:, :vocab].topk(min(KEPT, vocab, laws.shape[1]))
            first = len(ctx.tokens) - len(step.tokens)
            for law, (row, node), likely, mass in zip(
                laws, tested, best.cpu(), chances.cpu(), strict=True
            ):
                child = tree.tries[node][0]
                own = tree.values[child] / max(tree.values[node], LEAST)
                apart = abs(own - float(law[tree.tokens[child]]))
                self._note(apart, first + row, likely, mass)
        if ctx.branches[ctx.branch].reason is None or not self.found:
            return
        begin = max(0, len(ctx.tokens) - WINDOW)
        laws_at = {-place - begin: (likely, mass) for _, place, likely, mass in self.found}
        places = sorted(place for place in laws_at if place > 0)
        if places:
            tokens = torch.stack([laws_at[place][0] for place in places])
            chances = torch.stack([laws_at[place][1] for place in places])
            ids = list(ctx.tokens[begin:])
            self.learner.take(Lesson(ids, places, tokens, chances, [], forward=True))

    def _note(self, apart: float, place: int, tokens: torch.Tensor, chances: torch.Tensor) -> None:
        """Of equal differences the earlier place stays."""
        entry = (apart, -place, tokens, chances)
        if len(self.found) < PLACES:
            heapq.heappush(self.found, entry)
        else:
            heapq.heappushpop(self.found, entry)
