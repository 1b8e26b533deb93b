"""What makes logits of a head's states: the target's output matrix, cut down to the tokens that it
may draft, or matrices of the head's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foretell.drafters.heads.networks.layers import widened
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.packed import PackedLinear


class Output:
    """Rows of the target's output matrix, with what the target makes of its logits.

    `kept` (Vd,): the tokens in ascending order; None: all. `own`: a matrix E -> Vd that a head has
    learnt in the place of the target's, or a ModuleList with one a depth; their logits are taken as
    they are. Raises Unsupported where the target's matrix is needed and no plain one, BadConfig for
    ids that are none of its tokens.
    """

    def __init__(self, decoder: Any, kept: torch.Tensor | None, own: nn.Module | None = None):
        loop = decoder.loop
        check_tokens(kept, own, decoder.vocab)
        self.kept = kept
        # In 32 bits: states may have more than the target's weights, and some norms take no other.
        own_norm: nn.Module = loop.norm
        wide = next(own_norm.parameters()).dtype == torch.float64
        self._norm = own_norm if wide else copy.deepcopy(own_norm).float()
        if own is not None:
            several = isinstance(own, nn.ModuleList)
            self.matrices: tuple[Any, ...] = tuple(own.children()) if several else (own,)
            self.scale, self.cap = 1.0, None
            return
        self.matrices = (decoder.head if kept is None else cut(decoder, kept),)
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
        """These, in the order of its logits."""
        return range(self.size) if self.kept is None else self.kept.tolist()

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """States (..., E) through the target's last norm, in the format that they have."""
        out: torch.Tensor = self._norm(widened(states))
        return out.to(states.dtype)

    def weight(self) -> torch.Tensor:
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
            places = depths.clamp(max=len(self.matrices) - 1)
            for place in places.unique().tolist():
                here = places == place
                out[here] = self.matrices[place](states[here]).to(out)
        if self.scale != 1:
            out = out * self.scale
        return self.cap * torch.tanh(out / self.cap) if self.cap else out


def check_tokens(kept: torch.Tensor | None, own: nn.Module | None, vocab: int) -> None:
    """Raises BadConfig where the tokens (Vd,) that are drafted are none of a vocabulary of this
    size, or matrices of a head's `own` have other rows than one for each.
    """
    if kept is not None and not ascending(kept, vocab):
        what = f"must be ids from 0 to {vocab - 1}, each once, in order, and one at least"
        raise BadConfig(f"kept tokens: {what}")
    drafted = vocab if kept is None else len(kept)
    matrices = own.children() if isinstance(own, nn.ModuleList) else [own] if own else []
    for matrix in matrices:
        rows = matrix.out_features
        if rows != drafted:
            raise BadConfig(f"own_matrix={rows}: must have a row for each of {drafted} tokens")


def ascending(kept: torch.Tensor, vocab: int) -> bool:
    """Whether these are ids of tokens, each once, in order, and not none."""
    if kept.dim() != 1 or not len(kept) or kept.is_floating_point():
        return False
    return bool(kept[0] >= 0 and (kept[1:] > kept[:-1]).all() and kept[-1] < vocab)


def cut(decoder: Any, kept: torch.Tensor) -> nn.Module:
    """The decoder's head with the outputs of these tokens alone; it shares no memory with the head.

    Raises Unsupported where the head is no plain matrix.
    """
    head = decoder.head
    if isinstance(head, PackedLinear):
        return head.take(kept)
    if type(head) is not nn.Linear:
        raise Unsupported.missing(
            "a trimmed vocabulary",
            decoder.name,
            f"a head that is one matrix ({type(head).__name__})",
            "use another draft model",
        )
    small = nn.Linear(head.in_features, len(kept), head.bias is not None, device="meta")
    small.weight = nn.Parameter(head.weight.detach()[kept], requires_grad=False)
    if head.bias is not None:
        small.bias = nn.Parameter(head.bias.detach()[kept], requires_grad=False)
    return small.eval()
