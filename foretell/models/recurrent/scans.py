"""What layers with a recurrent state compute over a chain or a tree of tokens.

Such a layer has two memories of a text: the last inputs of a short convolution (its *window*) and a
state, which every token decays and adds to. In a tree every node goes on from its parent, so that
one forward over a tree gives each node the outputs of its own path.

For scalar decays (state-space duality, Mamba-2) this has a closed form, which is that of STree
(Wu et al., 2025): with `sums` the sum of the logarithms of decays on the way from the text to a
node, inclusive, and j among the ancestors of i and i itself,

    output i  =  c_i . exp(sums_i) state  +  sum over j of exp(sums_i - sums_j) (c_i . b_j) x_j

Letters: N nodes, the last n of them new; H heads in G groups, P their width, S numbers of a state a
channel, C channels and K taps of a convolution. `parents`: of each node, -1: the text.

The published code differs in three ways. It replays a round with the steps of rejected nodes set to
zero, where `advance_dual` is given the accepted nodes alone. It takes differences of sums in
float32, which is inexact after a token that forgets all; sums are float64 here. And its trees have
at most one block of nodes; there is no limit here.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F


@lru_cache(maxsize=512)
def convolution_rows(parents: tuple[int, ...], taps: int) -> torch.Tensor:
    """Rows (N, taps) of each node's last ancestors and itself, oldest first.

    They are places in the window's taps - 1 rows and the nodes' rows after these.
    """
    window_rows = taps - 1
    positions: list[list[int]] = []
    for node, parent in enumerate(parents):
        ancestor_rows = positions[parent][1:] if parent >= 0 else list(range(window_rows))
        positions.append([*ancestor_rows, window_rows + node])
    return torch.tensor(positions)


def convolve_rows(
    rows: torch.Tensor,
    parents: tuple[int, ...] | None,
    first_node: int,
    window: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Convolves each channel for itself, causally: (n, C) of the nodes from `first_node` on.

    rows (N, C) of all nodes; `parents` None: a chain. window (K - 1, C): the text's last rows.
    weight (C, K), bias (C,).
    """
    all_rows = torch.cat([window.to(rows), rows])
    channels, taps = weight.shape
    if parents is None:
        new_rows = all_rows[first_node:].T[None]
        return F.conv1d(new_rows, weight[:, None], bias, groups=channels)[0].T.contiguous()
    tap_rows = all_rows[convolution_rows(parents, taps)[first_node:].to(rows.device)]
    convolved = torch.einsum("nkc,ck->nc", tap_rows, weight)
    return convolved if bias is None else convolved + bias


def slide_window(window: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The window after these rows (m, C), which follow it."""
    if not len(rows):
        return window
    return torch.cat([window.to(rows), rows])[len(rows) :].clone()


def by_head(groups: torch.Tensor, head_count: int) -> torch.Tensor:
    """Repeats (..., G, S) -> (..., H, S): what neighbouring heads share."""
    return groups.repeat_interleave(head_count // groups.shape[-2], -2)


def dual_outputs(
    state: torch.Tensor,
    decays: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    ancestor_mask: torch.Tensor,
) -> torch.Tensor:
    """Outputs (n, H, P) that the last n of N nodes read.

    state (H, P, S) of the text; logarithms of decays (N, H); x (N, H, P), what is added to the
    state along b (N, G, S); c (n, G, S), along which it is read; seen (N, N), bool: i sees itself
    and its ancestors.
    """
    new_count, head_count = len(c), x.shape[1]
    decay_sums = ancestor_mask.to(torch.float64) @ decays.double()
    gaps = decay_sums[-new_count:, None] - decay_sums[None]
    # Masked before the exponential: of a node that is no ancestor it may overflow.
    decay_factors = gaps.to(x).masked_fill_(~ancestor_mask[-new_count:, :, None], -torch.inf).exp_()
    overlap = torch.einsum("igs,jgs->ijg", c, b)
    weights = overlap.repeat_interleave(head_count // b.shape[1], -1) * decay_factors
    tree_part = torch.einsum("ijh,jhp->ihp", weights, x)
    text_part = torch.einsum("ihs,hps->ihp", by_head(c, head_count), state.to(x))
    return tree_part + text_part * decay_sums[-new_count:].exp().to(x)[..., None]


def advance_dual(
    state: torch.Tensor, decays: torch.Tensor, x: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """The state (H, P, S) after a chain of m nodes; arguments as those of `dual_outputs`."""
    if not len(decays):
        return state
    decay_sums = decays.double().cumsum(0)
    remaining_decay = (decay_sums[-1] - decay_sums).exp().to(x)
    added_state = torch.einsum("mh,mhp,mhs->hps", remaining_decay, x, by_head(b, x.shape[1]))
    return state * decay_sums[-1].exp().to(x)[:, None, None] + added_state
