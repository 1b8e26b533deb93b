"""The denoising loop: look at the canvas, propose tokens, commit some of them, again.

What a method decides is small: which positions may be filled now (`eligible`), and which proposals
are committed (`choose`). Draws are keyed by position and by how many tokens were committed before,
so that a canvas is the same in any company.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.core import tracing
from foretell.core.masked_text import MASKED, MASKS, Look, Sheet, look
from foretell.core.masked_text import OWN as OWN
from foretell.core.refusals import refuse_options, refuse_policy, refuse_source
from foretell.core.stats import logprobs
from foretell.core.types import Commit, Drop, Fork, Kept, Message, Reply, Steps, Tell
from foretell.diffusion.planner import Planner, View, planner_of
from foretell.errors import BadConfig, Unsupported
from foretell.speculation.strategy import Strategy

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

OF_A_PATH = "it is a function of the tokens before, and a canvas is not filled from left to right"
REFUSED = dict.fromkeys(
    (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "bad_words",
        "logits_processors",
        "warp",
        "json_schema",
        "regex",
        "grammar",
        "constraint",
    ),
    OF_A_PATH,
)
OF_GIVEN: tuple[None, list[Any]] = (
    None,
    [],
)  # entry of a token that was given: the model had no say in it
CANVAS = "canvas"  # of a request's inputs: the tokens behind its prompt, MASKED where to be filled


class Proposals:
    """What the model says of the positions `places`, by its rows (n, V)."""

    def __init__(self, ctx: Context, sheet: Sheet, places: Sequence[int], rows: torch.Tensor):
        self.ctx, self.sheet = ctx, sheet
        self.places = list(places)
        self.rows = rows
        mask_id = getattr(ctx.models["target"], "mask_id", None)
        if mask_id is not None:
            self.rows[:, mask_id] = -torch.inf  # a mask is no token
        self.p = self.rows.softmax(-1)
        self.drawn: dict[int, int] = {}
        self._scored: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.places)

    def _scores(self) -> torch.Tensor:
        sampler = self.ctx.sampler
        sampling = sampler.sampling
        scores = self.rows
        held = [place - self.sheet.first < sampling.min_new_tokens for place in self.places]
        if sampling.logit_bias or (any(held) and sampler.stops):
            scores = scores.clone()
        for token, bias in sampling.logit_bias.items():
            scores[:, token] += bias
        for number, early in enumerate(held):
            if early and sampler.stops:
                scores[number, list(sampler.stops)] = -torch.inf
        return scores

    @property
    def scores(self) -> torch.Tensor:
        """Rows (n, V) with what sampling adds to them, before temperature and filters."""
        if self._scored is None:
            self._scored = self._scores()
        return self._scored

    def law(self, number: int) -> torch.Tensor:
        """Of the token at places[number] (V,), with all that sampling does to it; at temperature 0
        before the best one is taken.
        """
        scores, sampler = self.scores[number], self.ctx.sampler
        law = scores.softmax(-1) if sampler.greedy else sampler.laws(scores[None])[0]
        if not bool(law.sum().isfinite()):
            raise sampler.fault(scores, self.rows[number])
        return law

    def token(self, number: int) -> int:
        """The token that is proposed for places[number], drawn when it is first asked for."""
        if number not in self.drawn:
            scores, sampler = self.scores[number], self.ctx.sampler
            if sampler.greedy:
                self.drawn[number] = sampler.best(scores, self.rows[number])
            else:
                law = self.law(number)
                place = self.places[number] - self.sheet.first
                self.drawn[number] = self.ctx.rng.sample(law, "target", place, self.sheet.commits)
        return self.drawn[number]

    def commit(self, sheet: Sheet, number: int, token: int | None = None) -> None:
        """Commits the token that is proposed for places[number], or another one in its place."""
        token = self.token(number) if token is None else token
        place = self.places[number]
        sheet.commit(place, token, float(self.p[number, token]))
        best = self.ctx.sampler.sampling.logprobs
        if best is not None:
            row = self.rows[number]
            known = int((row > -torch.inf).sum())  # a mask is not among the best
            (sheet.logprobs[place],) = logprobs(row[None], [token], min(best, known))

    def tokens(self) -> torch.Tensor:
        """Of all positions (n,)."""
        return torch.tensor([self.token(n) for n in range(len(self))], device=self.p.device)

    def chances(self) -> torch.Tensor:
        """Of the proposed tokens (n,), by the model's own rows."""
        return self.p.gather(1, self.tokens()[:, None])[:, 0]

    def entropies(self) -> torch.Tensor:
        """Of the model's own laws (n,), in nats."""
        return -torch.special.xlogy(self.p, self.p).sum(-1)

    def margins(self) -> torch.Tensor:
        """Chance of the likeliest token less that of the next one (n,)."""
        best = self.p.topk(2, -1).values
        return best[:, 0] - best[:, 1]


def ranked(scores: torch.Tensor) -> list[int]:
    """Numbers of positions, the highest score first, of equal ones the earlier position."""
    order: list[int] = scores.argsort(descending=True, stable=True).tolist()
    return order


@dataclass(frozen=True)
class Denoising(Strategy):
    """The base of methods that fill a canvas of max_new_tokens masks behind the prompt."""

    block = OWN  # positions filled before later ones; 0: all; -1: the model's, else 32
    kind = "diffusion"
    needs = ("canvas", MASKS)
    one_text = True
    knows_order = False  # whether it knows the next positions before it looks
    remasks = False  # whether committed tokens of the current block may be taken back

    @property
    def canvases(self) -> int:
        """How many it has side by side at most, each with cache rows of its own."""
        return 1

    @property
    def most_texts(self) -> int:
        return self.canvases

    def __post_init__(self) -> None:
        if self.block < OWN:
            allowed = f"a number of positions, 0 for all, or {OWN} for the model's own"
            raise BadConfig.field("block", self.block, allowed)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        check(ctx)
        self.check(ctx, planner_of(ctx))
        return self.rounds(ctx)

    def rounds(self, ctx: Context) -> Steps:
        """Looks and fills until the text is done."""
        sheet = begun(ctx)
        planner = planner_of(ctx)
        planner.start(sheet)
        state = self.start(ctx, sheet)
        reason = yield from committed_prefix(ctx, sheet, sheet.end)
        while reason is None:
            found = yield from self.looked(ctx, sheet, planner, state)
            self.fill(sheet, found, state)
            sheet.rounds += 1
            reason = yield from committed_prefix(ctx, sheet, self.settled(sheet))

    def looked(
        self, ctx: Context, sheet: Sheet, planner: Planner, state: Any
    ) -> Generator[Message, Any, Proposals]:
        """One forward, and what it proposes."""
        block = sheet.block(self.block)
        view = planner.plan(sheet, block, self.eligible(ctx, sheet, state))
        reply: Reply = yield asked(ctx, sheet, view)
        return Proposals(ctx, sheet, view.wanted, reply.logits)

    # --- what a method decides

    def check(self, ctx: Context, planner: Planner) -> None:
        """What else it cannot honour of a request. Raises as `run`."""

    def start(self, ctx: Context, sheet: Sheet) -> Any:
        """What it remembers of this canvas."""
        return None

    def eligible(self, ctx: Context, sheet: Sheet, state: Any) -> Sequence[int]:
        """The masked positions that may be filled now."""
        start, end = sheet.block(self.block)
        return [place for place in sheet.masked if start <= place < end]

    def fill(self, sheet: Sheet, found: Proposals, state: Any) -> None:
        """Commits what it chooses, at least one token."""
        for number in self.choose(sheet, found, state):
            found.commit(sheet, number)

    def choose(self, sheet: Sheet, found: Proposals, state: Any) -> Sequence[int]:
        """Numbers of the proposals that are committed now."""
        raise NotImplementedError

    def settled(self, sheet: Sheet) -> int:
        """The position before which no committed token changes any more."""
        return sheet.block(self.block)[0] if self.remasks and sheet.masked else sheet.end


@dataclass(frozen=True)
class Ordered(Denoising):
    """Commits the proposals of highest rank, a number of them that the steps decide."""

    steps = 0  # forwards in all, shared among the blocks; 0: one for each token

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0:
            raise BadConfig.field("steps", self.steps, "a number of forwards, or 0: one a token")

    def start(self, ctx: Context, sheet: Sheet) -> Any:
        return Quotas(self.steps, len(sheet.masked))

    def choose(self, sheet: Sheet, found: Proposals, state: Any) -> Sequence[int]:
        count = state.next(sheet.block(self.block), len(found))
        return ranked(self.rank(found))[:count]

    def rank(self, found: Proposals) -> torch.Tensor:
        """A score of each proposal (n,)."""
        raise NotImplementedError


class Quotas:
    """How many tokens each step of a block commits (LLaDA, generate.py: what does not divide goes
    to the first steps).
    """

    def __init__(self, steps: int, masks: int):
        self.steps, self.masks = steps, masks
        self.block: tuple[int, int] | None = None
        self.left: list[int] = []

    def steps_of(self, masked: int) -> int:
        """How many steps a block of so many masks gets."""
        if not self.steps:
            return masked
        return min(masked, max(1, round(self.steps * masked / self.masks)))

    def next(self, block: tuple[int, int], masked: int) -> int:
        """Of a block with so many masks, of which it knows when the block begins."""
        if block != self.block or not self.left:
            self.block = block
            steps = self.steps_of(masked)
            share, more = divmod(masked, steps)
            self.left = [share + (number < more) for number in range(steps)]
        return self.left.pop(0)


def take_back(sheet: Sheet, block: tuple[int, int], count: int) -> None:
    """Masks again the committed tokens of a block that had the lowest chances, of equal ones the
    earlier.
    """
    own = [place for place in sheet.known if block[0] <= place < block[1]]
    for place in sorted(own, key=lambda place: (sheet.known[place][1], place))[:count]:
        sheet.mask(place)


def check(ctx: Context) -> None:
    """Raises BadConfig or Unsupported for what no denoiser can honour of a request."""
    name = ctx.request.name
    target = ctx.models["target"]
    refuse_options(name, ctx.request.sampling, REFUSED)
    refuse_source(name, ctx.request)
    if not isinstance(ctx.request.trace, tracing.Steps | None):
        need = "a method that writes from left to right: a canvas has no drafts to show"
        raise Unsupported.missing(f"trace of {name}", target.name, need, "watch it with stream")
    if MASKS not in target.caps:  # planners are of canvases of masks
        refuse_policy(name, ctx.request)
    mask_id = getattr(target, "mask_id", None)
    if mask_id in ctx.tokens:
        raise BadConfig(
            f"a prompt cannot have the mask token ({mask_id}): only LM.fill takes texts with gaps"
        )
    begun(ctx)


def begun(ctx: Context) -> Sheet:
    """The canvas of a request. Raises Unsupported where it is longer than its text may become."""
    name, target = ctx.request.name, ctx.models["target"]
    room = ctx.limit - len(ctx.tokens)
    behind = list(ctx.request.inputs.get(CANVAS, [MASKED] * canvas_of(target, ctx, room)))
    if CANVAS in ctx.request.inputs and len(behind) > room:
        raise Unsupported(
            f"{name}: the canvas has {len(behind)} positions behind its prompt, and there is room "
            f"for {room}; shorten it, or raise max_new_tokens"
        )
    first = len(ctx.tokens)
    given = frozenset(first + i for i, token in enumerate(behind) if token != MASKED)
    return Sheet([*ctx.tokens, *behind], first, given, own_block=getattr(target, "block", 0))


def canvas_of(target: Model, ctx: Context, room: int) -> int:
    """How long a canvas of `room` tokens is. A model that was taught canvases of one length fills
    whole ones, as far as its context reaches, and what is beyond the limit is cut off. One that was
    taught none beyond a length fills no longer one: it would be lost in it.
    """
    longest: int = getattr(target, "longest_canvas", 0)
    if longest:
        return min(room, longest)
    length: int = getattr(target, "canvas_length", 1)
    return min(-(-room // length) * length, max(room, target.context - len(ctx.tokens)))


def looks(
    ctx: Context,
    sheets: Sequence[Sheet],
    views: Sequence[View],
    home: int,
) -> Generator[Message, Any, tuple[list[int], list[Proposals]]]:
    """One forward over several canvases, each on a branch of its own: the first on `home`, whose
    rows they all begin with. Returns the branches and what each proposes.
    """
    branches = [home]
    if len(sheets) > 1:
        branches += yield Fork(home, len(sheets) - 1, quiet=True)
    asks = [
        asked(ctx, sheet, view, branch)
        for sheet, view, branch in zip(sheets, views, branches, strict=True)
    ]
    replies: list[Reply] = yield [*asks]
    found = [
        Proposals(ctx, sheet, view.wanted, reply.logits)
        for sheet, view, reply in zip(sheets, views, replies, strict=True)
    ]
    return branches, found


def stay(branches: Sequence[int], home: int) -> Generator[Message, Any, None]:
    """Goes on with one of these branches: the others are dropped, but the text's own."""
    for branch in branches:
        if branch not in (0, home):
            yield Drop(branch)


def asked(ctx: Context, sheet: Sheet, view: View, branch: int = 0) -> Look:
    """The forward over a canvas that a view describes."""
    view = view.reaching(getattr(ctx.models["target"], "shift", 0))
    last = ctx.on(branch).tokens[-1]
    return look(last, sheet.canvas, view.wanted, view.computed, view.attended, branch)


def committed_prefix(
    ctx: Context, sheet: Sheet, settled: int
) -> Generator[Message, Any, str | None]:
    """Tells what has changed, and makes the tokens final that no mask precedes, up to a position.
    Returns why the text ended, None: it goes on.
    """
    changed = sheet.changes()
    if changed is not None:
        yield Tell(changed, sheet.end - sheet.first, ctx.branch)
    start = len(ctx.tokens)
    end = start
    while end < min(settled, sheet.end) and sheet.canvas[end] != MASKED:
        end += 1
    tokens = sheet.canvas[start:end]
    reason: str | None = None
    if tokens:
        sources = ["given" if place in sheet.given else "target" for place in range(start, end)]
        known: list[Any] = []
        if ctx.sampler.sampling.logprobs is not None:
            known = [sheet.logprobs.get(place, OF_GIVEN) for place in range(start, end)]
        none = torch.empty(0)
        kept: Kept = yield Commit(tokens, none, ctx.branch, sources, logprobs=known)
        reason = kept.reason
    if reason is None and not sheet.masked and end == sheet.end:
        return "length"
    return reason
