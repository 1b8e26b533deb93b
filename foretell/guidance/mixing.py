"""Rows that are mixed of several: of other prompts, other models and other layers.

Mixed are logarithms of chances, so what a model adds to all logits of a row changes nothing. A
token that one of the rows calls impossible stays so: no difference of infinities is taken.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.source import Nodes, follow
from foretell.core.tokenizer_bytes import related
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Open, Reply
from foretell.errors import PromptTooLong, Unsupported
from foretell.ops.logits import resized

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

FAR = 1000.0  # nats below the others, which no temperature in use makes a chance of
NEVER = -1e9  # a logarithm of chance below which a token counts as impossible


# --- of rows


def wanted(tree: TokenTree, nodes: Nodes) -> Sequence[int]:
    """The nodes whose rows are asked for, by name."""
    return range(len(tree)) if nodes is None else nodes


def logs(rows: torch.Tensor, vocab: int = 0) -> torch.Tensor:
    """Logarithms of the laws of logits (N, V); of `vocab` tokens, where that is given."""
    if vocab and rows.shape[-1] != vocab:
        rows = torch.stack([resized(row, vocab) for row in rows])
    return rows.log_softmax(-1)


def extrapolated(strong: torch.Tensor, weak: torch.Tensor, g: float) -> torch.Tensor:
    """weak + g (strong - weak), of logarithms (N, V)."""
    return possible(weak + g * (strong - weak), strong, weak)


def possible(mixed: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """`mixed` (N, V), -inf where one of its parts calls a token impossible."""
    never = torch.zeros_like(mixed, dtype=torch.bool)
    for part in parts:
        never |= ~(part > NEVER)
    return mixed.masked_fill(never, -torch.inf)


def plausible(mixed: torch.Tensor, own: torch.Tensor, least: float) -> torch.Tensor:
    """`mixed` (N, V) with the tokens below `least` times the best one's chance by `own` (N, V),
    logarithms, FAR below all others, in the order of `own`: so a grammar that forbids all of the
    others still finds one.

    Source: Li et al., "Contrastive Decoding" (arXiv 2210.15097), section 3.3.
    """
    if not least:
        return mixed
    top = own.amax(-1, keepdim=True)
    out = own < top + math.log(least)
    lowest = mixed.masked_fill(out | (mixed == -torch.inf), torch.inf).amin(-1, keepdim=True)
    return torch.where(out & (mixed > -torch.inf), lowest - FAR + own - top, mixed)


# --- of other prompts


@dataclass(slots=True)
class Beside:
    """A quiet branch: another prompt, and behind it the output of the text."""

    branch: int
    start: int  # tokens that the text had when it was opened
    model: str


def open_beside(
    ctx: Context, name: str, prompt: Sequence[int], model: str = "target"
) -> Generator[Message, Any, Beside]:
    """Opens one for the source `name`. Raises PromptTooLong or Unsupported."""
    for given in ("source", "pictures"):
        if given in ctx.request.inputs:
            raise Unsupported.missing(
                f"{name} with another prompt",
                ctx.models["target"].name,
                f"a prompt of text alone, and this request has {given}",
                "leave rows out, or take the rows of another model",
            )
    answer = ctx.limit - len(ctx.tokens) + len(ctx.output)
    context = ctx.models[model].context
    if len(prompt) + answer > context:
        raise PromptTooLong(
            f"{name}: its prompt of {len(prompt)} tokens and an answer of up to {answer} are more "
            f"than {ctx.models[model].name} holds ({context}); shorten it, or lower max_new_tokens"
        )
    branch = yield Open([*prompt, *ctx.output], model)
    return Beside(branch, len(ctx.tokens), model)


def ask_beside(
    ctx: Context, beside: Beside, tree: TokenTree, nodes: Sequence[int]
) -> Generator[Message, Any, Ask]:
    """The ask for the rows of these nodes of `tree` behind the other prompt."""
    yield from follow(ctx, beside.branch, beside.start)
    last = ctx.on(beside.branch).tokens[-1]
    return Ask(tree.rooted(last), beside.model, beside.branch, rows=nodes)


# --- of other models


def check_partner(field: str, models: Mapping[str, Model], name: str) -> None:
    """Raises Unsupported where a model's rows cannot be mixed with the target's.

    One that is not there is refused elsewhere, with how to load it.
    """
    target, partner = models["target"], models.get(name)
    if partner is None:
        return
    if not related(partner.tokenizer, target.tokenizer):
        raise Unsupported.missing(
            f"{field}={name}",
            f"{target.name} and {partner.name}",
            "one vocabulary, and their tokenizers are different ones",
            "give a model with the target's tokenizer",
        )


def check_room(ctx: Context, field: str, name: str) -> None:
    """Raises PromptTooLong or Unsupported where another model cannot read the request's text."""
    partner = ctx.models[name]
    if ctx.limit > partner.context:
        raise PromptTooLong(
            f"{field}={name}: the text may become {ctx.limit} tokens long and {partner.name} holds "
            f"{partner.context}; lower max_new_tokens, or shorten the prompt"
        )
    if any(token >= partner.vocab for token in ctx.tokens):
        raise Unsupported.missing(
            f"{field}={name}",
            partner.name,
            f"all tokens of the prompt, and its vocabulary has {partner.vocab}",
            "give a model with the target's vocabulary",
        )


# --- of other layers


def layer_rows(model: Model, reply: Reply, tap: int) -> torch.Tensor:
    """Rows (n, V) that the model's norm and head make of what enters layer `tap` at the nodes whose
    rows were asked for; float32 or wider.
    """
    places = {node: place for place, node in enumerate(reply.new)}
    states = reply.hidden[tap][[places[node] for node in reply.nodes]]
    with torch.inference_mode():
        rows = model.read(states)
    return rows if rows.dtype == torch.float64 else rows.float()
