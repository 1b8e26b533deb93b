"""The loop over a decoder's layers, where a family has the usual skeleton.

It calls the model's own modules one by one, so that hidden states can be read, layers left out and
the middle entered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from foretell.ops.memory import rounded

NORMS = ("norm", "final_layer_norm", "final_layernorm")  # names of the norm before the head


class Block(Protocol):
    """One layer: (hidden (1, P, E), rotary, positions (1, T)) -> hidden (1, P, E).

    `takes_padding`: whether P may exceed T. Rows from T on are padding: nothing reads them.
    """

    takes_padding: bool

    def __call__(
        self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor
    ) -> torch.Tensor: ...


class Halves(Protocol):
    """The parts of a layer one by one, each with what the residual stream adds to it."""

    def attention(
        self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor
    ) -> torch.Tensor: ...

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor: ...


class StockBlock:
    """A layer computed by the model's own module.

    `attention` and `mlp` are for layers of the commonest build only: see Loop.halved.
    """

    takes_padding = False

    def __init__(self, layer: nn.Module):
        self.layer: Any = layer

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        return self._first(self._run(self.layer, hidden, rotary, positions))

    def attention(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        out = self._run(layer.self_attn, layer.input_layernorm(hidden), rotary, positions)
        return hidden + self._first(out)

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        return hidden + self._first(layer.mlp(layer.post_attention_layernorm(hidden)))

    @staticmethod
    def _run(module: Any, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> Any:
        return module(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=rotary,
            use_cache=False,
        )

    @staticmethod
    def _first(out: Any) -> torch.Tensor:
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first


@contextmanager
def attending(config: Any, kind: str = "foretell") -> Iterator[None]:
    """Inside, modules that read this configuration use this kind of attention."""
    before = config._attn_implementation
    config._attn_implementation = kind
    try:
        yield
    finally:
        config._attn_implementation = before


class Loop:
    """The usual skeleton of a decoder taken apart: embedding, layers, final norm, head.

    `head`: what makes rows of the normed states; the model's own one brings the scales and the cap
    of its logits. `windows`: of each layer, how many positions a node sees, itself included; None:
    all. `stock_forward` runs the model itself on `ids` (1, T); its rows are kept as `stock_rows`.
    Raises LookupError where the skeleton is another.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        head: nn.Module,
        windows: Sequence[int | None],
        context: int,
        ids: torch.Tensor,
        stock_forward: Callable[[], torch.Tensor],
    ):
        body: Any = hf.get_decoder()
        norm: Any = next((getattr(body, name) for name in NORMS if hasattr(body, name)), None)
        self.rotary: Any = getattr(body, "rotary_emb", None)
        layers: Any = getattr(body, "layers", ())
        if norm is None or self.rotary is None or len(layers) != len(windows):
            raise LookupError("its parts are not those of the usual skeleton")
        self.config = hf.config.get_text_config()
        self.windows = windows
        self.context = context
        self.embed: Any = hf.get_input_embeddings()
        self.layers: Sequence[nn.Module] = layers
        self.norm = norm
        self.head: Any = head
        self.kept: torch.Tensor | None = None  # tokens that the head's outputs are; None: all
        own_head = head is hf.get_output_embeddings()
        self.logit_factor = getattr(self.config, "logit_scale", None) if own_head else None
        self.logit_divisor = getattr(self.config, "logits_scaling", None) if own_head else None
        self.logit_cap = getattr(self.config, "final_logit_softcapping", None) if own_head else None
        self.rotary_tables: dict[tuple[str, ...], tuple[torch.Tensor, ...]] = {}
        by_kind = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self.kinds: list[str] | None = list(self.config.layer_types) if by_kind else None
        self.blocks: list[Block] = [StockBlock(layer) for layer in layers]
        self.refused: str | None = None  # why no faster blocks honour its configuration
        self.halved = False  # whether the blocks are Halves that give what the whole layers do
        # (A, T) of the running forward's tokens where some have several numbers in place of one.
        self.axes: Callable[[], torch.Tensor | None] | None = None
        entering: dict[nn.Module, torch.Tensor] = {}
        turned: dict[nn.Module, Any] = {}  # how, of each layer

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            entering[module] = args[0] if args else kwargs["hidden_states"]
            turned[module] = kwargs.get("position_embeddings")

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        try:
            self.stock_rows = stock_forward()
        finally:
            for hook in hooks:
                hook.remove()
        self.scale = self._embedding_scale(self.embed(ids), entering[layers[0]])
        for i, layer in enumerate(layers):
            self._check_rotation(i, entering[layer], turned[layer])

    def _check_rotation(self, index: int, h: torch.Tensor, given: Any) -> None:
        """Raises LookupError where a layer was not given (`given`) the rotation of all, or of its
        kind.
        """
        kind = () if self.kinds is None else (self.kinds[index],)
        ours = self.rotation(h, torch.arange(h.shape[1], device=h.device)[None], *kind)
        if not isinstance(given, tuple) or not isinstance(ours, tuple):
            return
        for own, other in zip(ours, given, strict=True):
            if own.shape != other.shape or not torch.allclose(own, other, atol=0.01):
                raise LookupError(f"layer {index} turns by a rotation of its own")

    def _embedding_scale(self, embedded: torch.Tensor, entering: torch.Tensor) -> float:
        """The factor between the embedding and what enters layer 0.

        It is measured up to rounding, so the nearest likely number is taken: one of the
        configuration's, 1, or the root of the width.
        """
        plain = embedded.double()
        measured = float((entering.double() * plain).sum() / plain.square().sum())
        likely = [1.0, self.config.hidden_size**0.5]
        likely += [value for value in vars(self.config).values() if type(value) is float]
        return min(likely, key=lambda value: abs(value - measured))

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """What enters layer 0 for these ids, (..., E)."""
        h: torch.Tensor = self.embed(ids)
        return h if self.scale == 1 else h * self.scale

    def table(self, h: torch.Tensor, needed: int, *kind: str) -> tuple[torch.Tensor, ...] | None:
        """The rotary module's answer (1, P, D) for positions 0 to P - 1, P at least `needed`.

        None: it answers with something else than a tensor a position.
        """
        table = self.rotary_tables.get(kind)
        if table is not None and table[0].shape[1] >= needed:
            return table
        # Some rotations change for every position once one is beyond the context: ask for none
        # there that is not needed.
        size = max(needed, min(2 * needed + 256, self.context))
        made = self.rotary(h, torch.arange(size, device=h.device)[None], *kind)
        if not isinstance(made, tuple):
            return None
        if not all(part.ndim == 3 and part.shape[1] == size for part in made):
            return None
        self.rotary_tables[kind] = made
        return made

    def rotation(self, h: torch.Tensor, positions: torch.Tensor, *kind: str) -> Any:
        """What the rotary module gives for these positions (1, T), from a table where it can."""
        axes = None if self.axes is None else self.axes()
        if axes is not None:
            return self._rotation_on(h, axes, *kind)
        table = self.table(h, int(positions.max()) + 1, *kind)
        if table is None:
            return self.rotary(h, positions, *kind)
        return tuple(part[:, positions[0]] for part in table)

    def _rotation_on(self, h: torch.Tensor, axes: torch.Tensor, *kind: str) -> Any:
        """The same of tokens with several numbers each, (A, T)."""
        table = self.table(h, int(axes.max()) + 1, *kind)
        if table is None:
            return self.rotary(h, axes[:, None], *kind)
        parts = tuple(part[:, axes[0]] for part in table)
        differ = (axes != axes[0]).any(0)
        if differ.any():
            for part, own in zip(parts, self.rotary(h, axes[:, None, differ], *kind), strict=True):
                part[:, differ] = own
        return parts

    def run(
        self,
        h: torch.Tensor,
        positions: torch.Tensor,
        layers: Sequence[int | tuple[int, str]],
        taps: Sequence[int],
        hidden: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """h (1, T, E) through `layers`, or halves of them, in order -> (1, T, E).

        `hidden[i]` (T, E) becomes, for each tap i, what enters layer i, or would if it ran;
        i = len(self.layers) is what leaves the last one, before the norm.
        """
        if self.kinds is None:
            rotary = [self.rotation(h, positions)] * len(self.layers)
        else:
            by_kind = {
                kind: self.rotation(h, positions, kind) for kind in dict.fromkeys(self.kinds)
            }
            rotary = [by_kind[kind] for kind in self.kinds]
        count = h.shape[1]
        padded = count
        if all(block.takes_padding for block in self.blocks):
            padded = self.padded_size(h)
        if padded > count:
            h = F.pad(h, (0, 0, 0, padded - count))
        for part in layers:
            i = part if isinstance(part, int) else part[0]
            for tap in taps:
                if tap <= i and tap not in hidden:
                    hidden[tap] = h[0, :count]
            if isinstance(part, int):
                h = self.blocks[i](h, rotary[i], positions)
                continue
            block: Any = self.blocks[i]
            h = block.attention(h, rotary[i], positions) if part[1] == "attention" else block.mlp(h)
        for tap in taps:
            if tap not in hidden:
                hidden[tap] = h[0, :count]
        return h[:, :count]

    @staticmethod
    def padded_size(h: torch.Tensor) -> int:
        """How many rows products compute for h (1, n, E); see ops/memory.py."""
        on_cpu = h.device.type == "cpu"
        if on_cpu and h.dtype in (torch.bfloat16, torch.float16):
            return rounded(h.shape[1])
        return h.shape[1]

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Rows (n, V) of what left the last layer, (n, E)."""
        count = len(h)
        padded = count
        # A recording brings its own padding, and products of 8 bits gain nothing by it.
        if type(self.head) is nn.Linear and not torch.jit.is_tracing():
            padded = self.padded_size(h[None])
        if padded > count:
            h = F.pad(h, (0, 0, 0, padded - count))
        out: torch.Tensor = self.head(self.norm(h))
        if padded > count:
            out = out[:count]
        if self.logit_factor:
            out = out * self.logit_factor
        if self.logit_divisor:
            out = out / self.logit_divisor
        if self.logit_cap:
            out = self.logit_cap * torch.tanh(out / self.logit_cap)
        return out
