"""Contrastive search: a likely token whose hidden state is unlike those of the text before it.

Each of the `k` best tokens v of a row is computed, and scored (1 - alpha) p(v) - alpha max_j
cos(h_v, h_j): p by the model, h the last hidden states, j over all tokens of prompt and output. The
token with the highest score is written. What a text says again has nearly the same states, so it
does not go round in circles. The k tokens are one tree and one forward, and the rows of the one
that is taken stay.

Paper: Su et al., A Contrastive Framework for Neural Text Generation, arXiv:2202.06417
Guarantee: lossy: another of the likely tokens may be taken, on purpose
Cost: target 1
Needs: trees; hidden states of the target
Trains: nothing
Differs:
- alpha and k are those of the authors' examples; their tables have k from 5 to 10, alpha from 0.5
to 0.8, by model
- p is of the row with penalties, bans and forms
- states are those after the last norm; where a model's norm is not known, those before it
- no drafter is asked: which token is taken depends on the states of all k, which are a tree already
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.refusals import refuse_options, refuse_policy
from foretell.core.settings import Range
from foretell.core.source import source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Kept, Message, Reply, Steps
from foretell.speculation.strategy import Strategy, decode_one_by_one
from foretell.strategies.rollouts import likeliest_tokens
from foretell.strategies.state_likeness import Directions, StateReader, apply_norm, last_tap
from foretell.verification.judge_model import states_at_nodes

if TYPE_CHECKING:
    from foretell.core.model import Model

DRAWN = "it decides by probabilities and states, nothing is drawn"
REFUSED = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "typical_p"), DRAWN)
READER = "states"


@dataclass(frozen=True)
class Contrastive(Strategy):
    """Contrastive search; greedy decoding with alpha=0 or k=1."""

    # what being unlike the text counts beside probability
    alpha: Annotated[float, Range(0, 1)] = 0.6
    k: Annotated[int, Range(1, 256)] = 4  # tokens that are compared

    draws = False

    @property
    def is_off(self) -> bool:
        return not self.alpha or self.k == 1

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.is_off else (READER,)

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.is_off else ("tree", "taps")

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        if self.is_off:
            return {}
        target = models["target"]
        return {READER: StateReader(target, last_tap(target))}

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for an option that cannot be honoured."""
        refuse_options("contrastive", ctx.request.sampling, REFUSED)
        refuse_policy("contrastive", ctx.request)
        return decode_one_by_one(ctx) if self.is_off else self._run_steps(ctx)

    def _run_steps(self, ctx: Context) -> Steps:
        target = ctx.models["target"]
        taps = (last_tap(target),)
        source = source_of(ctx.request)
        state = yield from source.start(ctx)
        tree = TokenTree(ctx.tokens[-1])
        reply = yield from source.read_rows(ctx, state, tree, taps, [0])
        row = reply.logits[-1]
        newest_state = states_at_nodes(reply, [0])
        preceding_states = yield from _read_preceding_states(ctx, taps[0])
        seen_directions = Directions(
            apply_norm(target, torch.cat([preceding_states.to(newest_state), newest_state]))
        )
        while True:
            candidates = likeliest_tokens(ctx, row, self.k)
            tree = TokenTree(ctx.tokens[-1])
            nodes = [tree.add(0, token) for token, _ in candidates]
            reply = yield from source.read_rows(ctx, state, tree, taps, nodes)
            states = apply_norm(target, states_at_nodes(reply, nodes))
            similarities = seen_directions.nearest(states)
            probabilities = similarities.new_tensor([log_prob for _, log_prob in candidates]).exp()
            best_index = int(
                ((1 - self.alpha) * probabilities - self.alpha * similarities).argmax()
            )
            commit_result: Kept = yield Commit(
                [candidates[best_index][0]], row[None], ctx.branch, ["target"]
            )
            if commit_result.reason:
                return
            row = dict(zip(reply.nodes, reply.logits, strict=True))[nodes[best_index]]
            seen_directions.add(states[best_index : best_index + 1])


def _read_preceding_states(ctx: Context, tap: int) -> Generator[Message, Any, torch.Tensor]:
    """The states (n, E) of all tokens but the last."""
    reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), READER, ctx.branch, rows=())
    return reply.hidden[tap]
