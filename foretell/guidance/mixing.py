"""Rows that are mixed of several: of other prompts, other models and other layers.

Mixed are logarithms of probabilities, so what a model adds to all logits of a row changes nothing.
A token that one of the rows calls impossible stays so: no difference of infinities is taken.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.source import Nodes, follow_text
from foretell.core.tokenizer_bytes import are_related
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Open, Reply
from foretell.errors import PromptTooLong, Unsupported
from foretell.ops.logits import resize_row

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

FAR = 1000.0  # nats below the others, which no temperature in use makes a probability of
NEVER = -1e9  # a logarithm of chance below which a token counts as impossible


# --- of rows


def requested_nodes(tree: TokenTree, nodes: Nodes) -> Sequence[int]:
    """Returns the numbers of the nodes whose rows are asked for."""
    return range(len(tree)) if nodes is None else nodes


def log_probs(logit_rows: torch.Tensor, vocab: int = 0) -> torch.Tensor:
    """Log-probabilities of logits (N, V); of `vocab` tokens, where that is given."""
    if vocab and logit_rows.shape[-1] != vocab:
        logit_rows = torch.stack([resize_row(row, vocab) for row in logit_rows])
    return logit_rows.log_softmax(-1)


def extrapolate_rows(strong_rows: torch.Tensor, weak_rows: torch.Tensor, g: float) -> torch.Tensor:
    """Returns weak + g (strong - weak), of logarithms (N, V)."""
    return mask_impossible(weak_rows + g * (strong_rows - weak_rows), strong_rows, weak_rows)


def mask_impossible(mixed_rows: torch.Tensor, *part_rows: torch.Tensor) -> torch.Tensor:
    """Returns `mixed_rows` (N, V), -inf where one of its parts calls a token impossible."""
    impossible_mask = torch.zeros_like(mixed_rows, dtype=torch.bool)
    for one_part in part_rows:
        impossible_mask |= ~(one_part > NEVER)
    return mixed_rows.masked_fill(impossible_mask, -torch.inf)


def mask_implausible(
    mixed_rows: torch.Tensor, target_logs: torch.Tensor, min_share: float
) -> torch.Tensor:
    """Returns `mixed_rows` (N, V) with the tokens below `min_share` times the best one's
    probability by `target_logs` (N, V), logarithms, FAR below all others, in the order of
    `target_logs`: so a grammar that forbids all of the others still finds one.

    Source: Li et al., "Contrastive Decoding" (arXiv 2210.15097), section 3.3.
    """
    if not min_share:
        return mixed_rows
    best_logs = target_logs.amax(-1, keepdim=True)
    implausible_mask = target_logs < best_logs + math.log(min_share)
    lowest_logs = mixed_rows.masked_fill(
        implausible_mask | (mixed_rows == -torch.inf), torch.inf
    ).amin(-1, keepdim=True)
    return torch.where(
        implausible_mask & (mixed_rows > -torch.inf),
        lowest_logs - FAR + target_logs - best_logs,
        mixed_rows,
    )


# --- of other prompts


@dataclass(slots=True)
class Beside:
    """A quiet branch: another prompt, and after it the output of the text."""

    branch: int
    start: int  # tokens that the text had when it was opened
    model: str


def open_beside(
    ctx: Context, name: str, prompt: Sequence[int], model: str = "target"
) -> Generator[Message, Any, Beside]:
    """Opens a quiet branch with another prompt for the source `name`. Raises PromptTooLong or
    Unsupported.
    """
    for input_name in ("source", "pictures"):
        if input_name in ctx.request.inputs:
            raise Unsupported.missing_capability(
                f"{name} with another prompt",
                ctx.models["target"].name,
                f"a prompt of text alone, and this request has {input_name}",
                "leave guidance out, or take the rows of another model",
            )
    answer_room = ctx.limit - len(ctx.tokens) + len(ctx.output)
    context_length = ctx.models[model].context
    if len(prompt) + answer_room > context_length:
        raise PromptTooLong(
            f"{name}: its prompt of {len(prompt)} tokens and an answer of up to {answer_room} are "
            f"more than {ctx.models[model].name} holds ({context_length}); shorten it, or lower "
            "max_new_tokens"
        )
    branch = yield Open([*prompt, *ctx.output], model)
    return Beside(branch, len(ctx.tokens), model)


def ask_beside(
    ctx: Context, other_branch: Beside, tree: TokenTree, nodes: Sequence[int]
) -> Generator[Message, Any, Ask]:
    """The ask for the rows of these nodes of `tree` after the other prompt."""
    yield from follow_text(ctx, other_branch.branch, other_branch.start)
    last_token = ctx.on(other_branch.branch).tokens[-1]
    return Ask(tree.reroot_at(last_token), other_branch.model, other_branch.branch, rows=nodes)


# --- of other models


def check_partner(field: str, models: Mapping[str, Model], name: str) -> None:
    """Raises Unsupported where a model's rows cannot be mixed with the target's.

    A model that is not there is refused elsewhere, with how to load it.
    """
    target, partner = models["target"], models.get(name)
    if partner is None:
        return
    if not are_related(partner.tokenizer, target.tokenizer):
        raise Unsupported.missing_capability(
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
        raise Unsupported.missing_capability(
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
    node_positions = {node: position for position, node in enumerate(reply.new)}
    states = reply.hidden[tap][[node_positions[node] for node in reply.nodes]]
    with torch.inference_mode():
        logit_rows = model.head_rows(states)
    return logit_rows if logit_rows.dtype == torch.float64 else logit_rows.float()
