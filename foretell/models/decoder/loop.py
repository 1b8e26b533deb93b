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

from foretell.models.families.description import find_skeleton
from foretell.ops.memory import round_row_count


class Block(Protocol):
    """A layer of the loop: (hidden (1, P, E), rotary, positions (1, T)) -> hidden (1, P, E).

    `takes_padding`: whether P may exceed T. Rows from T on are padding: nothing reads them.
    """

    takes_padding: bool

    def __call__(
        self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor
    ) -> torch.Tensor: ...


class StockBlock:
    """A layer computed by the model's own module.

    `attention` and `mlp` are for layers of the commonest build only: see Loop.halved.
    """

    takes_padding = False

    def __init__(self, layer: nn.Module):
        self.layer: Any = layer

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        return self._first_output(self._run_module(self.layer, hidden, rotary, positions))

    def attention(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        output = self._run_module(layer.self_attn, layer.input_layernorm(hidden), rotary, positions)
        return hidden + self._first_output(output)

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        return hidden + self._first_output(layer.mlp(layer.post_attention_layernorm(hidden)))

    @staticmethod
    def _run_module(module: Any, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> Any:
        return module(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=rotary,
            use_cache=False,
        )

    @staticmethod
    def _first_output(output: Any) -> torch.Tensor:
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden


@contextmanager
def use_attention(config: Any, attention_kind: str = "foretell") -> Iterator[None]:
    """Inside, modules that read this configuration use the attention `attention_kind`."""
    previous = config._attn_implementation
    config._attn_implementation = attention_kind
    try:
        yield
    finally:
        config._attn_implementation = previous


class Loop:
    """The skeleton of a decoder taken apart: embedding, layers, final norm, head, as the family's
    description says where they are.

    `rotary`: what makes the tables by which heads turn; None: they do not. `positions`: embeddings
    of positions, whose row `first_position` is that of position 0; None: there are none.
    `head`: what makes rows of the normed states; the model's own one brings the scales and the cap
    of its logits. `windows`: of each layer, how many positions a node sees, itself included; None:
    all. `stock_forward` runs the model itself on `ids` (1, T); its rows are kept as `stock_rows`.
    Raises LookupError where the skeleton is another.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        head: nn.Module,
        windows: Sequence[int | None],
        context: int,
        token_ids: torch.Tensor,
        stock_forward: Callable[[], torch.Tensor],
    ):
        body: Any = hf_model.get_decoder()
        self.config = hf_model.config.get_text_config()
        skeleton = find_skeleton(self.config)
        norm_names = [name for name in skeleton.norms if hasattr(body, name)]
        final_norm: Any = getattr(body, norm_names[0]) if norm_names else None
        layers: Any = skeleton.layers_of(body)
        self.rotary: Any = getattr(body, skeleton.rotary, None) if skeleton.rotary else None
        self.positions: Any = getattr(body, skeleton.positions) if skeleton.positions else None
        self.first_position = skeleton.first_position
        lacks_rotary = bool(skeleton.rotary) and self.rotary is None
        if final_norm is None or lacks_rotary or len(layers) != len(windows):
            raise LookupError("its parts are not those of the usual skeleton")
        self.windows = windows
        self.context = context
        self.embed: Any = hf_model.get_input_embeddings()
        self.layers: Sequence[nn.Module] = layers
        self.norm = final_norm
        self.head: Any = head
        self.kept: torch.Tensor | None = None  # tokens that the head's outputs are; None: all
        has_own_head = head is hf_model.get_output_embeddings()
        self.logit_factor = getattr(self.config, "logit_scale", None) if has_own_head else None
        self.logit_divisor = getattr(self.config, "logits_scaling", None) if has_own_head else None
        self.logit_cap = (
            getattr(self.config, "final_logit_softcapping", None) if has_own_head else None
        )
        self.rotary_tables: dict[tuple[str, ...], tuple[torch.Tensor, ...]] = {}
        by_kind = (
            self.rotary is not None
            and "layer_type" in inspect.signature(self.rotary.forward).parameters
        )
        self.kinds: list[str] | None = list(self.config.layer_types) if by_kind else None
        self.blocks: list[Block] = [StockBlock(layer) for layer in layers]
        self.refused: str | None = None  # why no faster blocks honour its configuration
        self.halved = False  # whether the blocks have halves that give what the whole layers do
        # (A, T) of the running forward's tokens where some have several numbers in place of one.
        self.axes: Callable[[], torch.Tensor | None] | None = None
        entering_states: dict[nn.Module, torch.Tensor] = {}
        rotations: dict[nn.Module, Any] = {}  # how, of each layer

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            entering_states[module] = args[0] if args else kwargs["hidden_states"]
            rotations[module] = kwargs.get("position_embeddings")

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        try:
            self.stock_rows = stock_forward()
        finally:
            for hook in hooks:
                hook.remove()
        first_states = entering_states[layers[0]]
        first_states = first_states - self.placed(
            torch.zeros_like(first_states),
            torch.arange(first_states.shape[1], device=first_states.device),
        )
        self.scale = self._embedding_scale(self.embed(token_ids), first_states)
        for layer_index, layer in enumerate(layers):
            self._check_rotation(layer_index, entering_states[layer], rotations[layer])

    def _check_rotation(self, layer_index: int, states: torch.Tensor, given_rotation: Any) -> None:
        """Raises LookupError where a layer was not given (`given_rotation`) the rotation of all, or
        of its kind.
        """
        layer_kind = () if self.kinds is None else (self.kinds[layer_index],)
        our_rotation = self.rotation(
            states, torch.arange(states.shape[1], device=states.device)[None], *layer_kind
        )
        if not isinstance(given_rotation, tuple) or not isinstance(our_rotation, tuple):
            return
        for our_part, given_part in zip(our_rotation, given_rotation, strict=True):
            if our_part.shape != given_part.shape or not torch.allclose(
                our_part, given_part, atol=0.01
            ):
                raise LookupError(f"layer {layer_index} turns by a rotation of its own")

    def _embedding_scale(self, embeddings: torch.Tensor, entering_states: torch.Tensor) -> float:
        """The factor between the embedding and what enters layer 0.

        It is measured up to rounding, so the nearest likely number is taken: one of the
        configuration's, 1, or the root of the width.
        """
        wide_embeddings = embeddings.double()
        measured_scale = float(
            (entering_states.double() * wide_embeddings).sum() / wide_embeddings.square().sum()
        )
        likely_scales = [1.0, self.config.hidden_size**0.5]
        likely_scales += [scale for scale in vars(self.config).values() if type(scale) is float]
        return min(likely_scales, key=lambda scale: abs(scale - measured_scale))

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., E) of these ids, which enter layer 0 once they are `placed`."""
        states: torch.Tensor = self.embed(token_ids)
        return states if self.scale == 1 else states * self.scale

    def placed(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """States (..., n, E) with what the model learnt of their positions (n,) added to them.

        Raises IndexError for a position beyond those that it learnt.
        """
        if self.positions is None:
            return states
        rows = F.embedding(positions + self.first_position, self.positions.weight)
        return states + rows.to(states.dtype)

    def position_rows(self) -> torch.Tensor | None:
        """What is added at each position (P, E), from position 0 on; None: nothing is."""
        if self.positions is None:
            return None
        rows: torch.Tensor = self.positions.weight[self.first_position :]
        return rows

    def table(
        self, states: torch.Tensor, position_count: int, *kind: str
    ) -> tuple[torch.Tensor, ...] | None:
        """The rotary module's answer (1, P, D) for positions 0 to P - 1, P at least
        `position_count`.

        None: it answers with something else than a tensor a position, or there is no such module.
        """
        if self.rotary is None:
            return None
        known_table = self.rotary_tables.get(kind)
        if known_table is not None and known_table[0].shape[1] >= position_count:
            return known_table
        # Some rotations change for every position once one is beyond the context: ask for none
        # there that is not needed.
        table_size = max(position_count, min(2 * position_count + 256, self.context))
        rotation = self.rotary(states, torch.arange(table_size, device=states.device)[None], *kind)
        if not isinstance(rotation, tuple):
            return None
        if not all(part.ndim == 3 and part.shape[1] == table_size for part in rotation):
            return None
        self.rotary_tables[kind] = rotation
        return rotation

    def rotation(self, states: torch.Tensor, positions: torch.Tensor, *kind: str) -> Any:
        """Rotations of these positions (1, T), from a table where the rotary module allows one;
        None: no head turns.
        """
        if self.rotary is None:
            return None
        axes = None if self.axes is None else self.axes()
        if axes is not None:
            return self._rotation_on(states, axes, *kind)
        table = self.table(states, int(positions.max()) + 1, *kind)
        if table is None:
            return self.rotary(states, positions, *kind)
        return tuple(part[:, positions[0]] for part in table)

    def _rotation_on(self, states: torch.Tensor, axes: torch.Tensor, *kind: str) -> Any:
        """Rotations of tokens with several numbers each, (A, T)."""
        table = self.table(states, int(axes.max()) + 1, *kind)
        if table is None:
            return self.rotary(states, axes[:, None], *kind)
        rotations = tuple(part[:, axes[0]] for part in table)
        differing = (axes != axes[0]).any(0)
        if differing.any():
            for part, exact_part in zip(
                rotations, self.rotary(states, axes[:, None, differing], *kind), strict=True
            ):
                part[:, differing] = exact_part
        return rotations

    def run(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        layer_parts: Sequence[int | tuple[int, str]],
        taps: Sequence[int],
        tapped_states: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Runs states (1, T, E) through `layer_parts`, or halves of them, in order -> (1, T, E).

        `tapped_states[i]` (T, E) becomes, for each tap i, what enters layer i, or would if it ran;
        i = len(self.layers) is what leaves the last one, before the norm.
        """
        if self.kinds is None:
            rotations = [self.rotation(states, positions)] * len(self.layers)
        else:
            rotation_by_kind = {
                layer_kind: self.rotation(states, positions, layer_kind)
                for layer_kind in dict.fromkeys(self.kinds)
            }
            rotations = [rotation_by_kind[layer_kind] for layer_kind in self.kinds]
        row_count = states.shape[1]
        padded_count = row_count
        if all(block.takes_padding for block in self.blocks):
            padded_count = self.padded_size(states)
        if padded_count > row_count:
            states = F.pad(states, (0, 0, 0, padded_count - row_count))
        for layer_part in layer_parts:
            layer = layer_part if isinstance(layer_part, int) else layer_part[0]
            for tap in taps:
                if tap <= layer and tap not in tapped_states:
                    tapped_states[tap] = states[0, :row_count]
            if isinstance(layer_part, int):
                states = self.blocks[layer](states, rotations[layer], positions)
                continue
            block: Any = self.blocks[layer]
            states = (
                block.attention(states, rotations[layer], positions)
                if layer_part[1] == "attention"
                else block.mlp(states)
            )
        for tap in taps:
            if tap not in tapped_states:
                tapped_states[tap] = states[0, :row_count]
        return states[:, :row_count]

    @staticmethod
    def padded_size(states: torch.Tensor) -> int:
        """The number of rows that products compute for states (1, n, E); see ops/memory.py."""
        on_cpu = states.device.type == "cpu"
        if on_cpu and states.dtype in (torch.bfloat16, torch.float16):
            return round_row_count(states.shape[1])
        return states.shape[1]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Rows (n, V) of states (n, E) that left the last layer."""
        row_count = len(states)
        padded_count = row_count
        # A recording brings its own padding, and products of 8 bits gain nothing by it.
        if type(self.head) is nn.Linear and not torch.jit.is_tracing():
            padded_count = self.padded_size(states[None])
        if padded_count > row_count:
            states = F.pad(states, (0, 0, 0, padded_count - row_count))
        logits: torch.Tensor = self.head(self.norm(states))
        if padded_count > row_count:
            logits = logits[:row_count]
        if self.logit_factor:
            logits = logits * self.logit_factor
        if self.logit_divisor:
            logits = logits / self.logit_divisor
        if self.logit_cap:
            logits = self.logit_cap * torch.tanh(logits / self.logit_cap)
        return logits
