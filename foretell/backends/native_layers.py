"""The C library's structures of a model's layers, filled from their descriptions."""

from __future__ import annotations

import ctypes
import operator
from typing import Any

import torch

from foretell.models.decoder.fused import Fused, Norm
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import PackedLinear
from foretell.models.decoder.packed_experts import pack_router
from foretell.models.families.description import ExpertsDescription
from foretell.native import library, steps

QKV = ("query", "key", "value")


class ModelBuilder:
    """Builds the structure of a model whose layers are all fused and packed, and holds what it
    points to.

    `width`: of a head; `kinds`: of layers with rotations of their own, in the order of these.
    """

    def __init__(self, loop: Loop, width: int, kinds: list[str]):
        self.loop = loop
        self.width = width
        self.kinds = kinds
        self.hidden = int(loop.config.hidden_size)
        self.windows = [window or 0 for window in loop.windows]
        self.numbers: list[torch.Tensor] = []  # that the library reads where they lie
        self.matrices: list[PackedLinear] = []
        self.structures: list[Any] = []  # that others point to
        self.experts: list[steps.Experts] = []  # of layers that have some

    @property
    def blocks(self) -> list[Fused]:
        """The layers."""
        return [block for block in self.loop.blocks if isinstance(block, Fused)]

    def build(self) -> steps.Model:
        blocks = self.blocks
        layers = (steps.Layer * len(blocks))()
        for index, block in enumerate(blocks):
            layers[index] = self._describe_layer(index, block)
        first_block = blocks[0]
        scale = float(self.loop.logit_factor or 1) / float(self.loop.logit_divisor or 1)
        model = steps.Model(
            layers=len(blocks),
            hidden=self.hidden,
            heads=first_block.queries,
            kv_heads=first_block.keys,
            width=self.width,
            logit_scale=scale,
            logit_cap=float(self.loop.logit_cap or 0),
            norm=self._describe_norm(Norm(self.loop.norm, first_block.description), self.hidden),
            layer=layers,
            head=self.loop.head.matrix,
        )
        position_rows = self.loop.position_rows()
        if position_rows is not None:
            model.position_count = len(position_rows)
            model.position_rows = self._keep_floats(position_rows, position_rows.numel())
        self.structures.append(layers)
        return model

    def _describe_layer(self, index: int, block: Fused) -> steps.Layer:
        description = block.description
        kind = self.kinds.index(self.loop.kinds[index]) if self.loop.kinds else 0
        query_width, key_width = block.queries * self.width, block.keys * self.width
        layer = steps.Layer(
            before_attention=self._describe_norm(block.before_attention, self.hidden),
            after_attention=self._describe_norm(block.after_attention, self.hidden),
            before_mlp=self._describe_norm(block.before_mlp, self.hidden),
            after_mlp=self._describe_norm(block.after_mlp, self.hidden),
            whole_heads=description.whole_heads,
            window=self.windows[index],
            rotation=kind if description.rotation else steps.NO_ROTATION,
            parallel=description.parallel,
            activation=steps.ACTIVATIONS.index(description.activation),
            scale=block.scale,
            score_cap=block.score_cap or 0.0,
            residual=description.residual,
        )
        if block.norms is not None:
            widths = (query_width, key_width) if description.whole_heads else (self.width,) * 2
            layer.query_norm, layer.key_norm = map(self._describe_norm, block.norms, widths)
        if block.sinks is not None:
            layer.sinks = self._keep_floats(block.sinks, block.queries)
        for name, matrix in self._describe_matrices(index, block).items():
            setattr(layer, name, matrix)
        if description.experts is not None:
            layer.experts = ctypes.pointer(self._describe_experts(index, description.experts))
        return layer

    def _describe_experts(self, index: int, described: ExpertsDescription) -> steps.Experts:
        """The library's structure of a layer's experts."""
        layer: Any = self.loop.layers[index]
        router = pack_router(layer.get_submodule(described.router))
        experts = steps.Experts(
            count=described.count,
            chosen=described.chosen,
            scoring=steps.SCORINGS.index(described.scoring),
            groups=described.groups,
            chosen_groups=described.chosen_groups,
            group_best=described.group_best,
            renormalized=described.renormalized,
            activation=steps.ACTIVATIONS.index(described.activation),
            scaling=described.scaling,
            router=router.matrix,
        )
        self.matrices.append(router)
        if described.choice_bias:
            bias: Any = operator.attrgetter(described.choice_bias)(layer)
            experts.choice_bias = self._keep_floats(bias, described.count)
        if described.share:
            experts.share = layer.get_submodule(described.share).matrix
        for name, linears in layer.get_submodule(described.experts).parts():
            structures = (library.Matrix * described.count)(*(linear.matrix for linear in linears))
            self.matrices += linears
            self.structures.append(structures)
            setattr(experts, name, ctypes.cast(structures, ctypes.c_void_p))
        self.experts.append(experts)
        return experts

    def _describe_matrices(self, index: int, block: Fused) -> dict[str, Any]:
        """The library's structures of a layer's matrices, by their fields there."""
        description = block.description
        own_names = [name for name in steps.MATRICES if not (description.qkv and name in QKV)]
        layer: Any = self.loop.layers[index]
        linears = {
            name: layer.get_submodule(getattr(description, name))
            for name in own_names
            if getattr(description, name)
        }
        if description.qkv:
            linears |= self._split_qkv(layer.get_submodule(description.qkv), block)
        if description.gate_up:
            joint = layer.get_submodule(description.gate_up)
            linears["gate"], linears["up"] = joint.split([joint.out_features // 2] * 2)
        self.matrices += linears.values()
        return {name: linear.matrix for name, linear in linears.items()}

    def _split_qkv(self, joint: PackedLinear, block: Fused) -> dict[str, PackedLinear]:
        """The matrices of queries, keys and values that one holds."""
        if not block.description.qkv_by_head:
            head_counts = (block.queries, block.keys, block.keys)
            parts = joint.split([count * self.width for count in head_counts])
            return dict(zip(QKV, parts, strict=True))
        outputs = torch.arange(joint.out_features).view(-1, 3, self.width)
        return {name: joint.take(outputs[:, part].flatten()) for part, name in enumerate(QKV)}

    def _describe_norm(self, norm: Norm | None, count: int) -> steps.Norm:
        if norm is None:
            return steps.Norm()
        bias = None if norm.bias is None else self._keep_floats(norm.bias, count)
        weight = self._keep_floats(norm.weight, count)
        return steps.Norm(weight=weight, bias=bias, eps=norm.eps, centered=norm.is_centered)

    def _keep_floats(self, tensor: torch.Tensor, number_count: int) -> int:
        float_tensor = tensor.detach().float().flatten().contiguous()
        self.numbers.append(float_tensor)
        return library.checked_address(float_tensor, (number_count,), torch.float32)
