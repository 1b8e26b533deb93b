"""The network of DFlash: it fills in a block of masked tokens at once, over the target's states.

Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036),
section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import Drafted, Head, HeadConfig, Nodes, Texts
from foretell.drafters.heads.networks.caches import UnknownStates
from foretell.drafters.heads.networks.layers import Attend, Layer, Norm, Rotation

ANCHORS = 128  # of a batch's texts, in training
AT_ONCE = 64  # blocks of a text that are computed together


class BlockAttention:
    """Attention of blocks in whole texts: to the text before their anchors, and within themselves.

    `anchors` (A,): places of the blocks' first tokens; `block_size`: rows of a block. The text's
    rows stand before those of the blocks. q, k and v are as in `Attend`, and only rows of blocks
    get a result.
    """

    def __init__(self, anchors: torch.Tensor, block_size: int, text_length: int):
        row_owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(block_size)
        sees_text = torch.arange(text_length, device=anchors.device) < anchors[row_owner, None]
        self.seen = torch.cat([sees_text, row_owner[:, None] == row_owner], 1)
        self.text = text_length

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(
            q[..., self.text :, :], k, v, attn_mask=self.seen, enable_gqa=True
        )
        return F.pad(attended, (0, 0, self.text, 0)).transpose(-3, -2)


class Dflash(Head):
    """A few layers over a block, whose keys and values are those of the text's states as well.

    A row of the text is norm(fc(taps)) of its own token, the same for all layers; it is read and
    never changed. A block is a token of the text and masks after it, which all see each other. The
    row of a mask speaks of the token that stands at its own place.
    """

    kind = "dflash"
    options: ClassVar[dict[str, Any]] = {
        "block": 8,  # tokens, the text's last one and the masks
        "layers": 2,
        "taps": (),  # (): what enters layers 2, L / 2 and L - 3
        "layer": {},  # where it differs from the target's, by the fields of `LayerShape`
        "head_norms": False,  # whether queries and keys are normed, as in qwen3
    }
    trained = ("block", "layers", "head_norms")
    decay = math.exp(-1 / 4)
    lag = 0
    cache = UnknownStates

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = self.shape
        self.block = self.whole_option("block", 2, 256)
        self.depths = self.block - 1
        self.layers = self.whole_option("layers", 1, 64)
        self.rotation = Rotation(shape.width, shape.theta)
        self.fc = nn.Linear(len(self.taps) * shape.hidden, shape.hidden, bias=False)
        self.state_norm = Norm(shape.hidden, shape.eps)
        norms = bool(self.option("head_norms"))
        self.stack = nn.ModuleList(Layer(shape, head_norms=norms) for _ in range(self.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.blank = nn.Parameter(0.02 * torch.randn(shape.hidden))

    @property
    def taps(self) -> tuple[int, ...]:
        layers = self.config.target.layers
        return self.chosen_taps() or (2, layers // 2, layers - 3)

    def run_layers(
        self,
        h: torch.Tensor,
        text: torch.Tensor,
        in_block: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Rows (..., n, E) of text and blocks as the output matrix reads them.

        h, text (..., n, E): what a row of a block is, and what a row of the text is; `in_block`
        (n,) tells which. `attend` is called once a layer.
        """
        rotation = self.rotation(positions)
        for layer in self.stack:
            normed_rows = layer.input_layernorm(h)  # type: ignore[operator]
            attended = torch.where(in_block[:, None], normed_rows, text)
            h = layer(h, rotation, attend, attended)
        out: torch.Tensor = self.norm(h)
        return out

    def text_rows(self, features: torch.Tensor) -> torch.Tensor:
        """Rows of the text (..., E) of the target's states (..., F)."""
        out: torch.Tensor = self.state_norm(self.fc(features))
        return out

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        """Drafts after some anchors in training, the same ones of all texts; else after every
        place.
        """
        context = self.text_rows(texts.features)
        anchors = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        if self.training:
            generator = torch.Generator().manual_seed(int(texts.ids.sum()))
            drawn_order = torch.randperm(len(anchors), generator=generator)[:ANCHORS]
            anchors = drawn_order.sort().values.to(anchors)
        state_parts = [self.block_rows(texts, context, part) for part in anchors.split(AT_ONCE)]
        block_states = torch.cat(state_parts, 1)  # (B, A, block, E)
        is_anchor = torch.zeros(texts.ids.shape[1], dtype=torch.bool, device=anchors.device)
        is_anchor[anchors] = True
        for depth in range(min(depths, self.block - 1)):
            states = block_states.new_zeros(*texts.ids.shape, block_states.shape[-1])
            states = states.index_copy(1, anchors, block_states[:, :, depth + 1])
            yield Drafted(depth, states, anchors=is_anchor)

    def block_rows(
        self, texts: Texts, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """(B, A, block, E): what the output matrix reads of blocks that begin at `anchors` (A,)."""
        assert self.blank is not None
        batch, length, width = context.shape
        mask_rows = self.blank.to(context).expand(batch, len(anchors), self.block - 1, width)
        anchor_rows = texts.embedded[:, anchors, None].to(context)
        blocks = torch.cat([anchor_rows, mask_rows], 2).flatten(1, 2)
        text_positions = torch.arange(length, device=anchors.device)
        block_positions = anchors[:, None] + torch.arange(self.block, device=anchors.device)
        positions = torch.cat([text_positions, block_positions.flatten()])
        h = torch.cat([torch.zeros_like(context), blocks], 1)
        text = torch.cat([context, torch.zeros_like(blocks)], 1)
        in_block = torch.arange(len(positions), device=anchors.device) >= length
        attend = BlockAttention(anchors, self.block, length)
        out = self.run_layers(h, text, in_block, positions, attend)
        return out[:, length:].unflatten(1, (len(anchors), self.block))

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """Nodes of the tree are the block; nothing is drafted below it."""
        text = self.text_rows(nodes.features)
        out = self.run_layers(nodes.embedded, text, nodes.drafted, nodes.positions, attend)
        return out, nodes.features
