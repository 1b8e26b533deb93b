"""The loop over a decoder's layers, where a family has the usual skeleton.

It calls the model's own modules one by one, so that hidden states can be read, layers left out and
the middle entered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from foretell.ops.memory import rounded

Block = Callable[
    [torch.Tensor, Any, torch.Tensor], torch.Tensor
]  # (hidden (1, T, E), rotary, positions) -> hidden


@contextmanager
def attending(config: Any, kind: str = "foretell") -> Iterator[None]:
    """Modules that read this configuration find this kind of attention in it."""
    before = config._attn_implementation
    config._attn_implementation = kind
    try:
        yield
    finally:
        config._attn_implementation = before


class Loop:
    """The usual skeleton of a decoder taken apart: embedding, layers, final norm, head. Raises
    LookupError if unusual.

    `windows`: of each layer, positions a node sees back, itself included, None: all. `reference`:
    logits of `whole()`, a forward of ids (1, T) by the model itself.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        windows: Sequence[int | None],
        context: int,
        ids: torch.Tensor,
        whole: Callable[[], torch.Tensor],
    ):
        body: Any = hf.get_decoder()
        names = ("norm", "final_layer_norm", "final_layernorm")
        norm: Any = next((getattr(body, name) for name in names if hasattr(body, name)), None)
        self.rotary: Any = getattr(body, "rotary_emb", None)
        layers: Any = getattr(body, "layers", ())
        if norm is None or self.rotary is None or len(layers) != len(windows):
            raise LookupError("not the usual skeleton")
        self.config, self.windows, self.context, self.norm = (
            hf.config.get_text_config(),
            windows,
            context,
            norm,
        )
        self.tables: dict[tuple[str, ...], tuple[torch.Tensor, ...]] = {}
        self.factor, self.divisor, self.cap = (
            getattr(self.config, name, None)
            for name in ("logit_scale", "logits_scaling", "final_logit_softcapping")
        )
        self.embed: Any = hf.get_input_embeddings()
        self.head: Any = hf.get_output_embeddings()
        self.layers: Sequence[torch.nn.Module] = layers
        named = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self.kinds: list[str] | None = list(self.config.layer_types) if named else None
        seen: list[torch.Tensor] = []

        def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])

        hook = layers[0].register_forward_pre_hook(note, with_kwargs=True)
        try:
            self.reference = whole()
        finally:
            hook.remove()
        plain = self.embed(ids).double()
        scale = float((seen[0].double() * plain).sum() / plain.square().sum())
        # Measured up to rounding: what was meant is a number of the configuration, or the usual
        # root.
        meant = [
            1.0,
            self.config.hidden_size**0.5,
            *(v for v in vars(self.config).values() if type(v) is float),
        ]
        self.scale = min(meant, key=lambda v: abs(v - scale))
        self.blocks: list[Block] = [self._stock(layer) for layer in layers]

    @staticmethod
    def _stock(layer: torch.nn.Module) -> Block:
        def block(h: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
            out = layer(
                h,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=rotary,
                past_key_values=None,
                use_cache=False,
            )
            return out[0] if isinstance(out, tuple) else out

        return block

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.embed(ids)
        return h if self.scale == 1 else h * self.scale

    def table(self, h: torch.Tensor, needed: int, *kind: str) -> tuple[torch.Tensor, ...] | None:
        """The rotary module's answer (1, P, D) for positions 0 to P - 1, at least `needed`; None:
        it gives no such.
        """
        table = self.tables.get(kind)
        if table is None or table[0].shape[1] < needed:
            # Within the context a position's rotation depends on nothing else, and never beyond it
            # is looked.
            every = torch.arange(max(needed, min(2 * needed + 256, self.context)), device=h.device)[
                None
            ]
            made = self.rotary(h, every, *kind)
            if not (
                isinstance(made, tuple)
                and all(m.ndim == 3 and m.shape[1] == every.shape[1] for m in made)
            ):
                return None
            table = self.tables[kind] = made
        return table

    def rotation(self, h: torch.Tensor, positions: torch.Tensor, *kind: str) -> Any:
        """What the rotary module gives for these positions (1, T), looked up in a table of all up
        to the largest.
        """
        table = self.table(h, int(positions.max()) + 1, *kind)
        return (
            self.rotary(h, positions, *kind)
            if table is None
            else tuple(part[:, positions[0]] for part in table)
        )

    def run(
        self,
        h: torch.Tensor,
        positions: torch.Tensor,
        layers: Sequence[int],
        taps: Sequence[int],
        hidden: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """h (1, T, E) through `layers`, in order; `hidden[i]` becomes what enters layer i, or would
        if it ran.

        i = len(self.layers) is what leaves the last one, before the norm.
        """
        if self.kinds is None:
            rotary = [self.rotation(h, positions)] * len(self.layers)
        else:
            each = {kind: self.rotation(h, positions, kind) for kind in dict.fromkeys(self.kinds)}
            rotary = [each[kind] for kind in self.kinds]
        new = h.shape[1]
        size = (
            self._size(h) if all(getattr(block, "fills", False) for block in self.blocks) else new
        )
        h = F.pad(h, (0, 0, 0, size - new)) if size > new else h
        for i in layers:
            hidden.update({t: h[0, :new] for t in taps if t <= i and t not in hidden})
            h = self.blocks[i](h, rotary[i], positions)
        hidden.update({t: h[0, :new] for t in taps if t not in hidden})
        return h[:, :new]

    @staticmethod
    def _size(h: torch.Tensor) -> int:
        """How many rows products compute for h (1, n, E)."""
        few = h.device.type == "cpu" and h.dtype in (torch.bfloat16, torch.float16)
        return rounded(h.shape[1]) if few else h.shape[1]

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """(n, E) -> (n, V)."""
        n = len(h)
        # Whoever records this fills up for himself, and products of 8 bits do not gain by it.
        size = (
            n if torch.jit.is_tracing() or type(self.head) is not nn.Linear else self._size(h[None])
        )
        if size > n:
            h = F.pad(h, (0, 0, 0, size - n))
        out: torch.Tensor = self.head(self.norm(h))
        if size > n:
            out = out[:n]
        if self.factor:
            out = out * self.factor
        if self.divisor:
            out = out / self.divisor
        return self.cap * torch.tanh(out / self.cap) if self.cap else out
