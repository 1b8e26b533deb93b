"""The layouts of Medusa: its authors', of version 1 (an output matrix behind each block) and 2 (the
target's), and vLLM's.

By the authors `{i}.{j}.linear` is layer j of the block of head i, and `{i}.{n}` the matrix behind
the last of n layers. In vLLM's names they are `blocks.{i}.layers.{j}` and `lm_heads.{i}`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from foretell.drafters.heads.formats.base import Format, target_name, write_folder
from foretell.drafters.heads.formats.checkpoint import Checkpoint
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.folder import build, target_shape
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig

TOKENS = "token_map"  # of vLLM: the tokens that its matrices' rows stand for


class MedusaFormat(Format):
    """By its authors."""

    name = "medusa"
    kind = "medusa"
    writes = True
    ways = ()
    heads = "medusa_num_heads"  # fields of the configuration
    layers = "medusa_num_layers"
    block: ClassVar[re.Pattern[str]] = re.compile(r"(\d+)\.(\d+)\.linear\.weight")

    def matches(self, checkpoint: Checkpoint) -> bool:
        return any(self.block.fullmatch(name) for name in checkpoint.shapes)

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        found = [self.block.fullmatch(name) for name in checkpoint.shapes]
        places = {(int(match[1]), int(match[2])) for match in found if match}
        count = checkpoint.counted({head for head, _ in places}, self.heads, "the block of head")
        depth = checkpoint.counted({layer for _, layer in places}, self.layers, "layer")
        kept = self.read_kept(checkpoint, target)
        matrices = self.matrices(checkpoint, target, kept, count, depth)
        rows = target.vocab if kept is None else len(kept)
        for name in matrices:
            if name in checkpoint and checkpoint.shapes[name][0] != rows:
                what = f"{name} has {checkpoint.shapes[name][0]} rows"
                raise checkpoint.bad(f"{what}, and {rows} tokens are drafted")
        options = {"blocks": count, "layers": depth, "own_matrix": rows if matrices else 0}
        head = build(self.kind, target_shape(target), options)
        names, filled = {}, set()
        for i in range(count):
            for j in range(depth):
                ours = f"blocks.{i}.linear" if depth == 1 else f"blocks.{i}.{j}.linear"
                names[f"{self.block_name(i, j)}.weight"] = f"{ours}.weight"
                if self.has_bias(checkpoint):
                    names[f"{self.block_name(i, j)}.bias"] = f"{ours}.bias"
                else:
                    filled.add(f"{ours}.bias")  # zero, as it begins
        names |= {theirs: f"matrix.{i}.weight" for i, theirs in enumerate(matrices)}
        checkpoint.check_tokens(target)
        checkpoint.fill(head, names, self.known(checkpoint), filled)
        return head, kept

    # --- what the two layouts differ in

    def block_name(self, head: int, layer: int) -> str:
        return f"{head}.{layer}.linear"

    def has_bias(self, checkpoint: Checkpoint) -> bool:
        return True

    def read_kept(self, checkpoint: Checkpoint, target: Any) -> torch.Tensor | None:
        """The tokens (Vd,) that are drafted, ascending; None: all. Raises BadModel."""
        return None

    def matrices(
        self,
        checkpoint: Checkpoint,
        target: Any,
        kept: torch.Tensor | None,
        heads: int,
        layers: int,
    ) -> list[str]:
        """The names of the heads' own output matrices, one a head; []: they use the target's.

        Raises BadModel.
        """
        names = [f"{i}.{layers}.weight" for i in range(heads)]
        return names if any(name in checkpoint for name in names) else []

    def known(self, checkpoint: Checkpoint) -> set[str]:
        """Further tensors that may be there, and are not kept."""
        return set()

    def write(self, head: Head, kept: torch.Tensor | None, target: Any, folder: Path) -> None:
        self.check(head)
        if kept is not None and head.matrix is not None:
            what = "has no place for matrices of some tokens alone"
            raise BadConfig(f"{self.name}: {what}; write --to medusa-vllm")
        own = head.state_dict()
        tensors = {}
        count, depth = head.option("blocks"), head.option("layers")
        for i in range(count):
            for j in range(depth):
                ours = f"blocks.{i}.linear" if depth == 1 else f"blocks.{i}.{j}.linear"
                for part in ("weight", "bias"):
                    tensors[f"{self.block_name(i, j)}.{part}"] = own[f"{ours}.{part}"]
        config = {self.heads: count, self.layers: depth}
        file, more = self.described(head, kept, target, tensors)
        write_folder(folder, file, tensors, config | more)

    def check(self, head: Head) -> None:
        """Raises BadConfig."""
        if head.kind != self.kind:
            raise BadConfig(f"{self.name}: holds no {head.kind} head; write --to foretell")

    def described(
        self,
        head: Head,
        kept: torch.Tensor | None,
        target: Any,
        tensors: dict[str, torch.Tensor],
    ) -> tuple[str, dict[str, Any]]:
        """Adds the output matrices; returns the file's name and what else config.json says."""
        told = {"base_model_name_or_path": target_name(target)}
        if head.matrix is None:
            return "medusa_lm_head.safetensors", {**told, "version": "2"}
        assert isinstance(head.matrix, nn.ModuleList)
        for i in range(len(head.matrix)):
            name = f"{i}.{head.option('layers')}.weight"
            tensors[name] = head.state_dict()[f"matrix.{i}.weight"]
        return "medusa_lm_head.safetensors", {**told, "version": "1"}


class MedusaVllmFormat(MedusaFormat):
    """As vLLM names it. Its matrices may be of some tokens, which `token_map` names."""

    name = "medusa-vllm"
    heads = "num_heads"
    layers = "num_hidden_layers"
    block = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.weight")

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        shape = target_shape(target)
        sizes = {"hidden_size": shape.hidden, "vocab_size": shape.vocab}
        checkpoint.check_sizes(checkpoint.config, sizes)
        checkpoint.drop_prefix("medusa_heads.")
        return super().load(checkpoint, target, taps)

    def block_name(self, head: int, layer: int) -> str:
        return f"blocks.{head}.layers.{layer}"

    def has_bias(self, checkpoint: Checkpoint) -> bool:
        """Only where its configuration says so."""
        return bool(checkpoint.config.get("medusa_fc_bias"))

    def read_kept(self, checkpoint: Checkpoint, target: Any) -> torch.Tensor | None:
        size = checkpoint.config.get("truncated_vocab_size", target.vocab)
        if size == target.vocab:
            return None
        if TOKENS not in checkpoint:
            raise checkpoint.bad(
                f"truncated_vocab_size={size!r}, and lacks {TOKENS}; fetch it again"
            )
        kept = checkpoint.tensor(TOKENS).long()
        if kept.shape != (size,):
            what = f"{TOKENS} is {tuple(kept.shape)}, and truncated_vocab_size={size!r}"
            raise checkpoint.bad(what)
        kept = kept.sort()[0]
        if int(kept[0]) < 0 or int(kept[-1]) >= target.vocab or bool((kept[1:] == kept[:-1]).any()):
            raise checkpoint.bad(f"{TOKENS}: must name tokens below {target.vocab}, each once")
        return kept

    def matrices(
        self,
        checkpoint: Checkpoint,
        target: Any,
        kept: torch.Tensor | None,
        heads: int,
        layers: int,
    ) -> list[str]:
        names = [f"lm_heads.{i}.weight" for i in range(heads)]
        scale = checkpoint.config.get("logit_scale", 1.0)
        one = bool(checkpoint.config.get("original_lm_head"))
        if one or not any(name in checkpoint for name in names):
            if scale != 1:
                raise checkpoint.bad(f"logit_scale={scale!r}, and its matrix is the target's")
            for name in sorted({"lm_head.weight", names[0]} & checkpoint.shapes.keys()):
                arranged = self.arranged(checkpoint, name, kept)
                if not checkpoint.is_targets(arranged, target, kept):
                    what = f"{name} is not the output matrix of {target.name}"
                    raise checkpoint.bad(f"{what}; give the model that it was made for")
                del checkpoint.shapes[arranged]
            return []
        here = [name in checkpoint for name in names]
        return [
            self.arranged(checkpoint, name, kept, float(scale)) if there else name
            for name, there in zip(names, here, strict=True)
        ]

    @staticmethod
    def arranged(
        checkpoint: Checkpoint, name: str, kept: torch.Tensor | None, scale: float = 1.0
    ) -> str:
        """The name of the matrix with its rows in the order of the tokens, and scaled."""
        rows: torch.Tensor | None = None
        count = checkpoint.shapes[name][0]
        if kept is not None:
            tokens = checkpoint.tensor(TOKENS).long()
            # A matrix of all tokens is cut down to them.
            rows = tokens.argsort() if count == len(tokens) else kept
        if rows is None or int(rows.max()) >= count:
            rows = torch.arange(count)
        order = rows

        def made(matrix: torch.Tensor) -> torch.Tensor:
            return matrix[order.to(matrix.device)] * scale

        checkpoint.join(f"{name} in order", [name], made)
        return f"{name} in order"

    def known(self, checkpoint: Checkpoint) -> set[str]:
        return {TOKENS}

    def described(
        self,
        head: Head,
        kept: torch.Tensor | None,
        target: Any,
        tensors: dict[str, torch.Tensor],
    ) -> tuple[str, dict[str, Any]]:
        shape = head.config.target
        if head.matrix is None:
            tensors["lm_head.weight"] = Output(target, kept).weight()
        else:
            assert isinstance(head.matrix, nn.ModuleList)
            for i in range(len(head.matrix)):
                tensors[f"lm_heads.{i}.weight"] = head.state_dict()[f"matrix.{i}.weight"]
        if kept is not None:
            tensors[TOKENS] = kept.long()
        return "model.safetensors", {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab,
            "truncated_vocab_size": shape.vocab if kept is None else len(kept),
            "original_lm_head": head.matrix is None,
            "medusa_fc_bias": True,
            "logit_scale": 1.0,
        }
