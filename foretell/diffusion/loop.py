"""The denoising loop: look at the canvas, propose tokens, commit some of them, again.

What a method decides is small: which positions may be filled now (`eligible_positions`), and which
proposals are committed (`choose_positions`). Draws are keyed by position and by how many tokens
were committed before, so that a canvas is the same in any company.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.core import tracing
from foretell.core.masked_text import MASKED, MASKS, Look, Sheet, make_look
from foretell.core.masked_text import OWN as OWN
from foretell.core.refusals import refuse_options, refuse_policy, refuse_source
from foretell.core.stats import row_logprobs
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
        "processor",
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
CANVAS = "canvas"  # of a request's inputs: the tokens after its prompt, MASKED where to be filled


class Proposals:
    """The model's proposals for the positions `places`, by its rows (n, V)."""

    def __init__(self, ctx: Context, sheet: Sheet, positions: Sequence[int], rows: torch.Tensor):
        self.ctx, self.sheet = ctx, sheet
        self.places = list(positions)
        self.rows = rows
        mask_id = getattr(ctx.models["target"], "mask_id", None)
        if mask_id is not None:
            self.rows[:, mask_id] = -torch.inf  # a mask is no token
        self.p = self.rows.softmax(-1)
        self.drawn_by_index: dict[int, int] = {}
        self._scored: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.places)

    def _biased_scores(self) -> torch.Tensor:
        sampler = self.ctx.sampler
        sampling = sampler.sampling
        scores = self.rows
        too_early = [
            position - self.sheet.first < sampling.min_new_tokens for position in self.places
        ]
        if sampling.logit_bias or (any(too_early) and sampler.stops):
            scores = scores.clone()
        for token, bias in sampling.logit_bias.items():
            scores[:, token] += bias
        for index, is_early in enumerate(too_early):
            if is_early and sampler.stops:
                scores[index, list(sampler.stops)] = -torch.inf
        return scores

    @property
    def scores(self) -> torch.Tensor:
        """Rows (n, V) with what sampling adds to them, before temperature and filters."""
        if self._scored is None:
            self._scored = self._biased_scores()
        return self._scored

    def law_at(self, index: int) -> torch.Tensor:
        """The distribution (V,) of the token at places[index], with all that sampling does to it;
        at temperature 0 before the best one is taken.
        """
        scores, sampler = self.scores[index], self.ctx.sampler
        probabilities = scores.softmax(-1) if sampler.greedy else sampler.laws(scores[None])[0]
        if not bool(probabilities.sum().isfinite()):
            raise sampler.fault(scores, self.rows[index])
        return probabilities

    def token_at(self, index: int) -> int:
        """The token that is proposed for places[number], drawn when it is first asked for."""
        if index not in self.drawn_by_index:
            scores, sampler = self.scores[index], self.ctx.sampler
            if sampler.greedy:
                self.drawn_by_index[index] = sampler.best_token(scores, self.rows[index])
            else:
                probabilities = self.law_at(index)
                position = self.places[index] - self.sheet.first
                self.drawn_by_index[index] = self.ctx.rng.sample(
                    probabilities, "target", position, self.sheet.commits
                )
        return self.drawn_by_index[index]

    def commit(self, sheet: Sheet, index: int, token: int | None = None) -> None:
        """Commits the token that is proposed for places[number], or another one in its place."""
        token = self.token_at(index) if token is None else token
        position = self.places[index]
        sheet.commit(position, token, float(self.p[index, token]))
        top_count = self.ctx.sampler.sampling.logprobs
        if top_count is not None:
            row = self.rows[index]
            finite_count = int((row > -torch.inf).sum())  # a mask is not among the best
            (sheet.logprobs[position],) = row_logprobs(
                row[None], [token], min(top_count, finite_count)
            )

    def drawn_tokens(self) -> torch.Tensor:
        """The proposed tokens of all positions (n,)."""
        return torch.tensor(
            [self.token_at(index) for index in range(len(self))], device=self.p.device
        )

    def token_probs(self) -> torch.Tensor:
        """Probabilities of the proposed tokens (n,), by the model's own rows."""
        return self.p.gather(1, self.drawn_tokens()[:, None])[:, 0]

    def token_entropies(self) -> torch.Tensor:
        """Entropies of the model's own distributions (n,), in nats."""
        return -torch.special.xlogy(self.p, self.p).sum(-1)

    def token_margins(self) -> torch.Tensor:
        """Probability of the likeliest token less that of the next one (n,)."""
        top_two = self.p.topk(2, -1).values
        return top_two[:, 0] - top_two[:, 1]


def rank_positions(scores: torch.Tensor) -> list[int]:
    """Indices of positions, the highest score first, of equal ones the earlier position."""
    ranking: list[int] = scores.argsort(descending=True, stable=True).tolist()
    return ranking


@dataclass(frozen=True)
class Denoising(Strategy):
    """The base of methods that fill a canvas of max_new_tokens masks after the prompt."""

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
        super().__post_init__()
        if self.block < OWN:
            allowed_values = f"a number of positions, 0 for all, or {OWN} for the model's own"
            raise BadConfig.field("block", self.block, allowed_values)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        check_denoiser(ctx)
        self.check_request(ctx, planner_of(ctx))
        return self.run_rounds(ctx)

    def run_rounds(self, ctx: Context) -> Steps:
        """Looks and fills until the text is done."""
        sheet = open_sheet(ctx)
        planner = planner_of(ctx)
        planner.start_canvas(sheet)
        state = self.start_state(ctx, sheet)
        reason = yield from committed_prefix(ctx, sheet, sheet.end)
        while reason is None:
            proposals = yield from self.propose_tokens(ctx, sheet, planner, state)
            self.fill_positions(sheet, proposals, state)
            sheet.rounds += 1
            reason = yield from committed_prefix(ctx, sheet, self.settled_end(sheet))

    def propose_tokens(
        self, ctx: Context, sheet: Sheet, planner: Planner, state: Any
    ) -> Generator[Message, Any, Proposals]:
        """Runs one forward and returns what it proposes."""
        block = sheet.block(self.block)
        view = planner.plan_view(sheet, block, self.eligible_positions(ctx, sheet, state))
        reply: Reply = yield build_look(ctx, sheet, view)
        return Proposals(ctx, sheet, view.requested, reply.logits)

    # --- what a method decides

    def check_request(self, ctx: Context, planner: Planner) -> None:
        """Checks what else it cannot honour of a request. Raises as `run`."""

    def start_state(self, ctx: Context, sheet: Sheet) -> Any:
        """The state that it remembers of this canvas."""
        return None

    def eligible_positions(self, ctx: Context, sheet: Sheet, state: Any) -> Sequence[int]:
        """The masked positions that may be filled now."""
        start, end = sheet.block(self.block)
        return [position for position in sheet.masked if start <= position < end]

    def fill_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> None:
        """Commits what it chooses, at least one token."""
        for index in self.choose_positions(sheet, proposals, state):
            proposals.commit(sheet, index)

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        """Indices of the proposals that are committed now."""
        raise NotImplementedError

    def settled_end(self, sheet: Sheet) -> int:
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

    def start_state(self, ctx: Context, sheet: Sheet) -> Any:
        return Quotas(self.steps, len(sheet.masked))

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        count = state.next_count(sheet.block(self.block), len(proposals))
        return rank_positions(self.rank_proposals(proposals))[:count]

    def rank_proposals(self, proposals: Proposals) -> torch.Tensor:
        """A score of each proposal (n,)."""
        raise NotImplementedError


class Quotas:
    """How many tokens each step of a block commits (LLaDA, generate.py: what does not divide goes
    to the first steps).
    """

    def __init__(self, steps: int, mask_count: int):
        self.steps, self.masks = steps, mask_count
        self.block: tuple[int, int] | None = None
        self.remaining: list[int] = []

    def steps_of(self, mask_count: int) -> int:
        """The number of steps that a block of so many masks gets."""
        if not self.steps:
            return mask_count
        return min(mask_count, max(1, round(self.steps * mask_count / self.masks)))

    def next_count(self, block: tuple[int, int], mask_count: int) -> int:
        """The number of tokens that the next step of a block with so many masks commits; the steps
        are shared out when the block begins.
        """
        if block != self.block or not self.remaining:
            self.block = block
            steps = self.steps_of(mask_count)
            base_count, remainder = divmod(mask_count, steps)
            self.remaining = [base_count + (step_index < remainder) for step_index in range(steps)]
        return self.remaining.pop(0)


def take_back(sheet: Sheet, block: tuple[int, int], count: int) -> None:
    """Masks again the committed tokens of a block that had the lowest probabilities, of equal ones
    the earlier.
    """
    committed_positions = [position for position in sheet.known if block[0] <= position < block[1]]
    for position in sorted(
        committed_positions, key=lambda position: (sheet.known[position][1], position)
    )[:count]:
        sheet.mask(position)


def check_denoiser(ctx: Context) -> None:
    """Raises BadConfig or Unsupported for what no denoiser can honour of a request."""
    method_name = ctx.request.name
    target = ctx.models["target"]
    refuse_options(method_name, ctx.request.sampling, REFUSED)
    refuse_source(method_name, ctx.request)
    if not isinstance(ctx.request.trace, tracing.Steps | None):
        need = "a method that writes from left to right: a canvas has no drafts to show"
        raise Unsupported.missing_capability(
            f"trace of {method_name}", target.name, need, "watch it with stream"
        )
    if MASKS not in target.caps:  # planners are of canvases of masks
        refuse_policy(method_name, ctx.request)
    mask_id = getattr(target, "mask_id", None)
    if mask_id in ctx.tokens:
        raise BadConfig(
            f"a prompt cannot have the mask token ({mask_id}): only LM.fill takes texts with gaps"
        )
    open_sheet(ctx)


def open_sheet(ctx: Context) -> Sheet:
    """Makes the canvas of a request. Raises Unsupported where it is longer than its text may
    become.
    """
    method_name, target = ctx.request.name, ctx.models["target"]
    max_tokens = ctx.limit - len(ctx.tokens)
    suffix = list(ctx.request.inputs.get(CANVAS, [MASKED] * canvas_of(target, ctx, max_tokens)))
    if CANVAS in ctx.request.inputs and len(suffix) > max_tokens:
        raise Unsupported(
            f"{method_name}: the canvas has {len(suffix)} positions after its prompt, and there "
            "is room "
            f"for {max_tokens}; shorten it, or raise max_new_tokens"
        )
    first_position = len(ctx.tokens)
    given_positions = frozenset(
        first_position + offset for offset, token in enumerate(suffix) if token != MASKED
    )
    return Sheet(
        [*ctx.tokens, *suffix],
        first_position,
        given_positions,
        own_block=getattr(target, "block", 0),
    )


def canvas_of(target: Model, ctx: Context, max_tokens: int) -> int:
    """The length of a canvas of `max_tokens` tokens. A model that was taught canvases of one length
    fills whole ones, as far as its context reaches, and what is beyond the limit is cut off. One
    that was taught none beyond a length fills no longer one: it would be lost in it.
    """
    longest_canvas: int = getattr(target, "longest_canvas", 0)
    if longest_canvas:
        return min(max_tokens, longest_canvas)
    canvas_length: int = getattr(target, "canvas_length", 1)
    return min(
        -(-max_tokens // canvas_length) * canvas_length,
        max(max_tokens, target.context - len(ctx.tokens)),
    )


def look_at_sheets(
    ctx: Context, sheets: Sequence[Sheet], views: Sequence[View], home_branch: int
) -> Generator[Message, Any, tuple[list[int], list[Proposals]]]:
    """Looks at several canvases in one forward, each on a branch of its own: the first on
    `home_branch`, whose rows they all begin with. Returns the branches and what each proposes.
    """
    branches = [home_branch]
    if len(sheets) > 1:
        branches += yield Fork(home_branch, len(sheets) - 1, quiet=True)
    asks = [
        build_look(ctx, sheet, view, branch)
        for sheet, view, branch in zip(sheets, views, branches, strict=True)
    ]
    replies: list[Reply] = yield [*asks]
    proposals = [
        Proposals(ctx, sheet, view.requested, reply.logits)
        for sheet, view, reply in zip(sheets, views, replies, strict=True)
    ]
    return branches, proposals


def drop_others(branches: Sequence[int], home_branch: int) -> Generator[Message, Any, None]:
    """Goes on with one of these branches: the others are dropped, but the text's own."""
    for branch in branches:
        if branch not in (0, home_branch):
            yield Drop(branch)


def build_look(ctx: Context, sheet: Sheet, view: View, branch: int = 0) -> Look:
    """Makes the forward over a canvas that a view describes."""
    view = view.with_shifted_rows(getattr(ctx.models["target"], "shift", 0))
    last_token = ctx.on(branch).tokens[-1]
    return make_look(last_token, sheet.canvas, view.requested, view.computed, view.attended, branch)


def committed_prefix(
    ctx: Context, sheet: Sheet, settled_end: int
) -> Generator[Message, Any, str | None]:
    """Tells what has changed, and makes the tokens final that no mask precedes, up to a position.
    Returns why the text ended, None: it goes on.
    """
    changed = sheet.take_changes()
    if changed is not None:
        yield Tell(changed, sheet.end - sheet.first, ctx.branch)
    start = len(ctx.tokens)
    end = start
    while end < min(settled_end, sheet.end) and sheet.canvas[end] != MASKED:
        end += 1
    tokens = sheet.canvas[start:end]
    reason: str | None = None
    if tokens:
        sources = [
            "given" if position in sheet.given else "target" for position in range(start, end)
        ]
        known_logprobs: list[Any] = []
        if ctx.sampler.sampling.logprobs is not None:
            known_logprobs = [
                sheet.logprobs.get(position, OF_GIVEN) for position in range(start, end)
            ]
        no_probs = torch.empty(0)
        commit_reply: Kept = yield Commit(
            tokens, no_probs, ctx.branch, sources, logprobs=known_logprobs
        )
        reason = commit_reply.reason
    if reason is None and not sheet.masked and end == sheet.end:
        return "length"
    return reason
