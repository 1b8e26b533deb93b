"""What a served draft model learns while it serves: lessons, and the updates made of them.

Verification tells the target's distributions anyway, so a finished response is a lesson for free. A
learner gathers some and orders an update, which the next request that drafts makes, outside the
engine's thread. A request keeps the weights of the last update that was ordered when it began:
which weights it has depends on what ended before it, never on how long an update took.

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
KEPT = 64  # likeliest shared tokens of the target's distribution; all others are one
WINDOW = 1024  # tokens of a lesson, the last ones of its text
PLACES = 64  # of a text, those where the draft was furthest from the target
LEFT_OUT = -1e30  # logarithm of the probability of a token that a trimmed model has no row for
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
        """The number of our tokens that it is about."""
        return len(self.direct) + len(self.merged)

    def loss(self, logits: torch.Tensor, row_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Loss of rows (L, V') after each of `ids`, in nats, summed over tokens of ours.

        `row_tokens` (V',): the tokens that the rows are of, in ascending order; None: all. Of the
        others nothing is learnt: the target's distribution is taken without them.
        """
        log_probs = logits.float().log_softmax(-1)
        loss = log_probs.new_zeros(())
        if self.direct:
            direct_log_probs = log_probs[[position - 1 for position in self.direct]]
            draft_log_probs, target_probs = restrict_probs(
                direct_log_probs, self.tokens, self.chances, row_tokens
            )
            divergence_of = forward_divergence if self.forward else reverse_divergence
            loss = loss + divergence_of(draft_log_probs, target_probs).sum()
        for start, end in self.merged:
            positions = torch.arange(start, end)
            span_ids = torch.tensor(self.ids[start:end])
            if row_tokens is not None:
                if not bool(torch.isin(span_ids, row_tokens).all()):
                    continue
                span_ids = torch.searchsorted(row_tokens, span_ids)
            loss = loss - MERGED * log_probs[positions - 1, span_ids].sum()
        return loss


def restrict_probs(
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    target_probs: torch.Tensor,
    row_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Restricts rows (n, V') of log q and the target's probabilities (n, K) to the tokens that rows
    have: (n, K) each, given that no token is left out.
    """
    if row_tokens is None:
        return log_probs.gather(1, tokens), target_probs
    columns = torch.searchsorted(row_tokens, tokens).clamp_max(len(row_tokens) - 1)
    has_row = row_tokens[columns] == tokens
    draft_log_probs = torch.where(has_row, log_probs.gather(1, columns), LEFT_OUT)
    lost_mass = torch.where(has_row, 0.0, target_probs).sum(-1, keepdim=True)
    return draft_log_probs, torch.where(
        has_row, target_probs / (1 - lost_mass).clamp_min(LEAST), 0.0
    )


def reverse_divergence(draft_log_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """D(q || p) (n,) of a draft's distributions from the target's: log q of some tokens (n, K), and
    their probabilities in p (n, K). All other tokens count as one.
    """
    q = draft_log_probs.exp()
    q_rest = (1 - q.sum(-1)).clamp_min(LEAST)
    p_rest = (1 - target_probs.sum(-1)).clamp_min(LEAST)
    listed_sum = (q * (draft_log_probs - target_probs.clamp_min(LEAST).log())).sum(-1)
    return listed_sum + q_rest * (q_rest.log() - p_rest.log())


def forward_divergence(draft_log_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """D(p

    q) (n,) of the target's distributions from a draft's: log q of some tokens (n, K), and their
    probabilities in p (n, K).
    """
    q_rest = (1 - draft_log_probs.exp().sum(-1)).clamp_min(LEAST)
    p_rest = (1 - target_probs.sum(-1)).clamp_min(LEAST)
    listed_terms = torch.where(
        target_probs > 0,
        target_probs * (target_probs.clamp_min(LEAST).log() - draft_log_probs),
        0.0,
    )
    return listed_terms.sum(-1) + p_rest * (p_rest.log() - q_rest.log())


def build_lesson(
    translated: Translated,
    shared_tokens: Shared,
    tokens: Sequence[int],
    target_laws: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Lesson | None:
    """Makes a lesson of a text whose last tokens had these distributions (ids of theirs,
    probabilities);
    None: it has nothing to learn.

    Bytes tell which tokens of the two stand in the same place.
    """
    token_ids = translated.token_ids
    positions_at: dict[int, list[int]] = {}  # by the byte that they begin with
    end_byte = 0
    for position, token in enumerate(token_ids):
        positions_at.setdefault(end_byte, []).append(position)
        end_byte += len(translated.model_words.piece(token) or b"")
    positions_at.setdefault(end_byte, []).append(len(token_ids))
    end_byte += len(translated.pending_bytes)
    first_position = max(0, len(token_ids) - WINDOW)
    direct_positions: list[int] = []
    direct_laws: list[tuple[torch.Tensor, torch.Tensor]] = []
    merged_spans: list[tuple[int, int]] = []
    for steps_back in range(1, len(target_laws) + 1):
        token = tokens[-steps_back]
        start_byte = end_byte - translated.bytes_of(token, len(tokens) - steps_back)
        partner_token = shared_tokens.partner.get(token)
        candidates = [
            position for position in positions_at.get(start_byte, ()) if position > first_position
        ]
        matching = [
            position
            for position in candidates
            if position < len(token_ids) and token_ids[position] == partner_token
        ]
        if partner_token is not None and matching:
            direct_positions.append(matching[-1] - first_position)
            direct_laws.append(target_laws[-steps_back])
        elif (
            partner_token is None
            and candidates
            and end_byte in positions_at
            and candidates[-1] + 1 < positions_at[end_byte][0]
        ):
            merged_spans.append(
                (candidates[-1] - first_position, positions_at[end_byte][0] - first_position)
            )
        end_byte = start_byte
    if not direct_positions and not merged_spans:
        return None
    token_count = max((len(likely_tokens) for likely_tokens, _ in direct_laws), default=0)
    likely_tokens = (
        torch.stack([likely_tokens for likely_tokens, _ in direct_laws])
        if direct_laws
        else torch.zeros(0, token_count)
    )
    chances = (
        torch.stack([likely_probs for _, likely_probs in direct_laws])
        if direct_laws
        else torch.zeros(0, token_count)
    )
    return Lesson(
        list(token_ids[first_position:]),
        direct_positions,
        likely_tokens.long(),
        chances,
        merged_spans,
    )


def learning_models(method_name: str, models: Mapping[str, Model]) -> dict[str, Model]:
    """The models of a drafter whose draft model learns. Raises Unsupported where it cannot."""
    draft_model = models.get("draft")
    if draft_model is None:  # which is told of where models are looked for
        return {}
    make_learning = getattr(draft_model, "learning", None)
    if make_learning is None:
        need = "a draft model whose weights torch can train"
        cure = "load one by transformers, or set online=0"
        raise Unsupported.missing_capability(f"{method_name}:online", draft_model.name, need, cure)
    return {"draft": make_learning()}


class Update:
    """Weights that are made of lessons when they are first asked for, or have been made."""

    def __init__(self, learner: Learner, previous: Update | None, lessons: list[Lesson]):
        self.learner = learner
        self.previous = previous
        self.lessons = lessons
        self.was_requested = previous is None
        self.value: Any = None  # None: the weights that were there in the beginning

    def get_weights(self) -> Any:
        """Makes the weights, once. What the learning raises is raised to one caller; the weights
        before the update then hold on.
        """
        with self.learner.lock:
            if self.previous is not None:
                self.value = self.previous.get_weights()
                lessons, self.lessons, self.previous = self.lessons, [], None
                self.value = self.learner.learn(lessons)
            return self.value

    def copy_for(self, learner: Learner) -> Update:
        """Copies an update for a copy of its learner. Weights never change, so that they are
        shared.
        """
        previous = self.previous and self.previous.copy_for(learner)
        twin = Update(learner, previous, list(self.lessons))
        twin.was_requested, twin.value = self.was_requested, self.value
        return twin


class Learner:
    """Learner of one tenant. An update is ordered for each `update_interval` lessons; `learn` makes
    its weights, each time from those that it made last.
    """

    def __init__(self, update_interval: int, make_weights: Callable[[Sequence[Lesson]], Any]):
        self.update_interval = update_interval
        self.learn = make_weights
        self.lessons: deque[Lesson] = deque(maxlen=update_interval)
        self.last_update = Update(self, None, [])
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Learner:
        with self.lock:
            twin = Learner(self.update_interval, copy.deepcopy(self.learn, memo))
            twin.lessons.extend(self.lessons)
            twin.last_update = self.last_update.copy_for(twin)
        return twin

    def take_lesson(self, lesson: Lesson) -> None:
        """Takes a lesson. While no request has asked for the last update, only the newest lessons
        are kept.
        """
        self.lessons.append(lesson)
        if len(self.lessons) == self.update_interval and self.last_update.was_requested:
            self.last_update = Update(self, self.last_update, list(self.lessons))
            self.lessons.clear()


@dataclass
class Pupil:
    """A request's part in learning: the weights it drafts with."""

    learner: Learner
    update: Update
    begun: bool = False

    def begin(self, ctx: Context, name: str = "draft") -> Generator[Message, Any, None]:
        """Before its first draft: gives the request its weights, which may have to be made."""
        if self.begun:
            return
        self.begun = True
        self.update.was_requested = True
        weights = yield Call(self.update.get_weights)
        model: Any = ctx.models[name]
        model.begin(ctx.request, weights)


@dataclass
class Study(Pupil):
    """A pupil with a draft model that has another tokenizer: all distributions that its request has
    seen.
    """

    laws: deque[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=lambda: deque(maxlen=WINDOW)
    )

    def observe(
        self, ctx: Context, translated: Translated, shared_tokens: Shared, step: Feedback
    ) -> None:
        """Notes the target's distributions; the end of the text makes them a lesson."""
        nodes = [0, *step.outcome.path][: len(step.tokens)]
        target_probs = step.reply.logits[nodes].float().softmax(-1)
        top_probs, top_indices = target_probs[:, shared_tokens.ours.to(target_probs.device)].topk(
            min(KEPT, len(shared_tokens.ours))
        )
        draft_tokens = shared_tokens.theirs[top_indices.cpu()]
        self.laws.extend(zip(draft_tokens, top_probs.cpu(), strict=True))
        if ctx.branches[ctx.branch].reason is None:
            return
        translated.read_text(ctx.tokens)
        lesson = build_lesson(translated, shared_tokens, ctx.tokens, list(self.laws))
        if lesson is not None:
            self.learner.take_lesson(lesson)


@dataclass
class Corrections(Pupil):
    """A pupil with a draft model that has the target's tokens: the distributions where its tokens
    were tested.

    Source: Liu et al., "Online Speculative Decoding" (arXiv 2310.07177), algorithm 1. Of a text at
    most PLACES are kept. Those come first where the probabilities that draft model and target gave
    the drafted token differ most: no difference of the two distributions in total variation is less
    than that.
    """

    # (that difference, minus the place in the text, the target's likeliest tokens, their
    # probabilities)
    worst_positions: list[tuple[float, int, torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )

    def observe(self, ctx: Context, vocab: int, step: Feedback) -> None:
        """Notes the target's distributions over the draft model's `vocab` tokens; the end of the
        text makes them a lesson.
        """
        tree = step.tree
        nodes = [0, *step.outcome.path][: len(step.tokens)]
        tested_nodes = [(row, node) for row, node in enumerate(nodes) if tree.tries[node]]
        if tested_nodes:
            target_probs = step.reply.logits[[node for _, node in tested_nodes]].float().softmax(-1)
            chances, top_tokens = target_probs[:, :vocab].topk(
                min(KEPT, vocab, target_probs.shape[1])
            )
            first_position = len(ctx.tokens) - len(step.tokens)
            for node_probs, (row, node), likely_tokens, likely_probs in zip(
                target_probs, tested_nodes, top_tokens.cpu(), chances.cpu(), strict=True
            ):
                child = tree.tries[node][0]
                draft_prob = tree.values[child] / max(tree.values[node], LEAST)
                difference = abs(draft_prob - float(node_probs[tree.tokens[child]]))
                self._note_position(difference, first_position + row, likely_tokens, likely_probs)
        if ctx.branches[ctx.branch].reason is None or not self.worst_positions:
            return
        text_start = max(0, len(ctx.tokens) - WINDOW)
        probs_at = {
            -position - text_start: (likely_tokens, likely_probs)
            for _, position, likely_tokens, likely_probs in self.worst_positions
        }
        positions = sorted(position for position in probs_at if position > 0)
        if positions:
            tokens = torch.stack([probs_at[position][0] for position in positions])
            chances = torch.stack([probs_at[position][1] for position in positions])
            token_ids = list(ctx.tokens[text_start:])
            self.learner.take_lesson(
                Lesson(token_ids, positions, tokens, chances, [], forward=True)
            )

    def _note_position(
        self, difference: float, position: int, tokens: torch.Tensor, target_probs: torch.Tensor
    ) -> None:
        """Notes a position with its difference. Of equal differences the earlier position stays."""
        candidate = (difference, -position, tokens, target_probs)
        if len(self.worst_positions) < PLACES:
            heapq.heappush(self.worst_positions, candidate)
        else:
            heapq.heappushpop(self.worst_positions, candidate)
