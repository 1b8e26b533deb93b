"""What makes logits of a head's states: the target's output matrix, cut down to the tokens that it
may draft, or matrices of the head's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foretell.drafters.heads.networks.layers import as_float32
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.packed import PackedLinear


class Output:
    """Rows of the target's output matrix, with what the target makes of its logits.

    `kept_tokens` (Vd,): the tokens in ascending order; None: all. `head_matrix`: a matrix E -> Vd
    that a head has learnt in the place of the target's, or a ModuleList with one a depth; their
    logits are taken as they are. Raises Unsupported where the target's matrix is needed and no
    plain one, BadConfig for ids that are none of its tokens.
    """

    def __init__(
        self, decoder: Any, kept_tokens: torch.Tensor | None, head_matrix: nn.Module | None = None
    ):
        loop = decoder.loop
        check_tokens(kept_tokens, head_matrix, decoder.vocab)
        self.kept = kept_tokens
        # In 32 bits: states may have more than the target's weights, and some norms take no other.
        last_norm: nn.Module = loop.norm
        is_wide = next(last_norm.parameters()).dtype == torch.float64
        self._norm = last_norm if is_wide else copy.deepcopy(last_norm).float()
        if head_matrix is not None:
            is_list = isinstance(head_matrix, nn.ModuleList)
            self.matrices: tuple[Any, ...] = (
                tuple(head_matrix.children()) if is_list else (head_matrix,)
            )
            self.scale, self.cap = 1.0, None
            return
        self.matrices = (decoder.head if kept_tokens is None else cut_head(decoder, kept_tokens),)
        self.scale = float(loop.logit_factor or 1) / float(loop.logit_divisor or 1)
        self.cap = loop.logit_cap

    @property
    def matrix(self) -> Any:
        """The one of depth 0."""
        return self.matrices[0]

    @property
    def size(self) -> int:
        """Tokens that it has rows for."""
        return int(self.matrix.out_features)

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that its logits are of, in their order."""
        return range(self.size) if self.kept is None else self.kept.tolist()

    def norm_states(self, states: torch.Tensor) -> torch.Tensor:
        """States (..., E) through the target's last norm, in the format that they have."""
        out: torch.Tensor = self._norm(as_float32(states))
        return out.to(states.dtype)

    def train_weight(self) -> torch.Tensor:
        """(Vd, E) in float32, scaled, for training."""
        matrix = self.matrix
        plain = matrix.plain() if isinstance(matrix, PackedLinear) else matrix
        return plain.weight.detach().float() * self.scale

    def logits(self, states: torch.Tensor, depths: torch.Tensor | None = None) -> torch.Tensor:
        """Normed states (..., E) -> logits (..., Vd).

        `depths` (...): at which they are drafted; None: all at 0. The last matrix reads those of
        all depths from its own on.
        """
        if depths is None or len(self.matrices) == 1:
            out: torch.Tensor = self.matrix(states)
        else:
            out = states.new_empty(*states.shape[:-1], self.size)
            matrix_numbers = depths.clamp(max=len(self.matrices) - 1)
            for matrix_number in matrix_numbers.unique().tolist():
                at_depth = matrix_numbers == matrix_number
                out[at_depth] = self.matrices[matrix_number](states[at_depth]).to(out)
        if self.scale != 1:
            out = out * self.scale
        return self.cap * torch.tanh(out / self.cap) if self.cap else out


def check_tokens(
    kept_tokens: torch.Tensor | None, head_matrix: nn.Module | None, vocab: int
) -> None:
    """Raises BadConfig where the tokens (Vd,) that are drafted are none of a vocabulary of this
    size, or matrices of a head's `head_matrix` have other rows than one for each.
    """
    if kept_tokens is not None and not are_ascending_ids(kept_tokens, vocab):
        expectation = f"must be ids from 0 to {vocab - 1}, each once, in order, and one at least"
        raise BadConfig(f"kept tokens: {expectation}")
    drafted_count = vocab if kept_tokens is None else len(kept_tokens)
    matrices = (
        head_matrix.children()
        if isinstance(head_matrix, nn.ModuleList)
        else [head_matrix]
        if head_matrix
        else []
    )
    for matrix in matrices:
        rows = matrix.out_features
        if rows != drafted_count:
            raise BadConfig(
                f"own_matrix={rows}: must have a row for each of {drafted_count} tokens"
            )


def are_ascending_ids(token_ids: torch.Tensor, vocab: int) -> bool:
    """Whether these are ids of tokens, each once, in order, and not none."""
    if token_ids.dim() != 1 or not len(token_ids) or token_ids.is_floating_point():
        return False
    return bool(
        token_ids[0] >= 0 and (token_ids[1:] > token_ids[:-1]).all() and token_ids[-1] < vocab
    )


def cut_head(decoder: Any, kept_tokens: torch.Tensor) -> nn.Module:
    """The decoder's head with the outputs of these tokens alone; it shares no memory with the head.

    Raises Unsupported where the head is no plain matrix.
    """
    head = decoder.head
    if isinstance(head, PackedLinear):
        return head.take(kept_tokens)
    if type(head) is not nn.Linear:
        raise Unsupported.missing_capability(
            "a trimmed vocabulary",
            decoder.name,
            f"a head that is one matrix ({type(head).__name__})",
            "use another draft model",
        )
    small_head = nn.Linear(head.in_features, len(kept_tokens), head.bias is not None, device="meta")
    small_head.weight = nn.Parameter(head.weight.detach()[kept_tokens], requires_grad=False)
    if head.bias is not None:
        small_head.bias = nn.Parameter(head.bias.detach()[kept_tokens], requires_grad=False)
    return small_head.eval()
