"""The layouts of Medusa: its authors', of version 1 (an output matrix after each block) and 2 (the
target's), and vLLM's.

By the authors `{i}.{j}.linear` is layer j of the block of head i, and `{i}.{n}` the matrix after
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
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig

TOKENS = "token_map"  # of vLLM: the tokens that its matrices' rows stand for


class MedusaFormat(Format):
    """Medusa's layout as its authors publish it."""

    name = "medusa"
    kind = "medusa"
    writes = True
    ways = ()
    heads = "medusa_num_heads"  # fields of the configuration
    layers = "medusa_num_layers"
    block: ClassVar[re.Pattern[str]] = re.compile(r"(\d+)\.(\d+)\.linear\.weight")

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        return any(self.block.fullmatch(name) for name in checkpoint.shapes)

    def load_head(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        name_matches = [self.block.fullmatch(name) for name in checkpoint.shapes]
        block_places = {(int(match[1]), int(match[2])) for match in name_matches if match}
        block_count = checkpoint.counted(
            {head for head, _ in block_places}, self.heads, "the block of head"
        )
        layer_count = checkpoint.counted({layer for _, layer in block_places}, self.layers, "layer")
        kept_tokens = self.read_kept_tokens(checkpoint, target)
        matrices = self.matrix_names(checkpoint, target, kept_tokens, block_count, layer_count)
        rows = target.vocab if kept_tokens is None else len(kept_tokens)
        for name in matrices:
            if name in checkpoint and checkpoint.shapes[name][0] != rows:
                complaint = f"{name} has {checkpoint.shapes[name][0]} rows"
                raise checkpoint.bad_model(f"{complaint}, and {rows} tokens are drafted")
        options = {
            "blocks": block_count,
            "layers": layer_count,
            "own_matrix": rows if matrices else 0,
        }
        head = build_head(self.kind, target_shape(target), options)
        names, filled = {}, set()
        for i in range(block_count):
            for j in range(layer_count):
                ours = f"blocks.{i}.linear" if layer_count == 1 else f"blocks.{i}.{j}.linear"
                names[f"{self.block_name(i, j)}.weight"] = f"{ours}.weight"
                if self.has_bias(checkpoint):
                    names[f"{self.block_name(i, j)}.bias"] = f"{ours}.bias"
                else:
                    filled.add(f"{ours}.bias")  # zero, as it begins
        names |= {theirs: f"matrix.{i}.weight" for i, theirs in enumerate(matrices)}
        checkpoint.check_tokens(target)
        checkpoint.fill_head(head, names, self.known_tensors(checkpoint), filled)
        return head, kept_tokens

    # --- what the two layouts differ in

    def block_name(self, head: int, layer: int) -> str:
        return f"{head}.{layer}.linear"

    def has_bias(self, checkpoint: Checkpoint) -> bool:
        return True

    def read_kept_tokens(self, checkpoint: Checkpoint, target: Any) -> torch.Tensor | None:
        """The tokens (Vd,) that are drafted, ascending; None: all. Raises BadModel."""
        return None

    def matrix_names(
        self,
        checkpoint: Checkpoint,
        target: Any,
        kept_tokens: torch.Tensor | None,
        heads: int,
        layers: int,
    ) -> list[str]:
        """The names of the heads' own output matrices, one a head; []: they use the target's.

        Raises BadModel.
        """
        names = [f"{i}.{layers}.weight" for i in range(heads)]
        return names if any(name in checkpoint for name in names) else []

    def known_tensors(self, checkpoint: Checkpoint) -> set[str]:
        """Further tensors that may be there, and are not kept."""
        return set()

    def write_head(
        self, head: Head, kept_tokens: torch.Tensor | None, target: Any, folder: Path
    ) -> None:
        self.check_kind(head)
        if kept_tokens is not None and head.matrix is not None:
            complaint = "has no place for matrices of some tokens alone"
            raise BadConfig(f"{self.name}: {complaint}; write --to medusa-vllm")
        head_state = head.state_dict()
        tensors = {}
        block_count, layer_count = head.option("blocks"), head.option("layers")
        for i in range(block_count):
            for j in range(layer_count):
                ours = f"blocks.{i}.linear" if layer_count == 1 else f"blocks.{i}.{j}.linear"
                for part in ("weight", "bias"):
                    tensors[f"{self.block_name(i, j)}.{part}"] = head_state[f"{ours}.{part}"]
        config = {self.heads: block_count, self.layers: layer_count}
        file, extra_fields = self.describe_file(head, kept_tokens, target, tensors)
        write_folder(folder, file, tensors, config | extra_fields)

    def check_kind(self, head: Head) -> None:
        """Raises BadConfig."""
        if head.kind != self.kind:
            raise BadConfig(f"{self.name}: holds no {head.kind} head; write --to foretell")

    def describe_file(
        self,
        head: Head,
        kept_tokens: torch.Tensor | None,
        target: Any,
        tensors: dict[str, torch.Tensor],
    ) -> tuple[str, dict[str, Any]]:
        """Adds the output matrices; returns the file's name and what else config.json says."""
        shared_fields = {"base_model_name_or_path": target_name(target)}
        if head.matrix is None:
            return "medusa_lm_head.safetensors", {**shared_fields, "version": "2"}
        assert isinstance(head.matrix, nn.ModuleList)
        for i in range(len(head.matrix)):
            name = f"{i}.{head.option('layers')}.weight"
            tensors[name] = head.state_dict()[f"matrix.{i}.weight"]
        return "medusa_lm_head.safetensors", {**shared_fields, "version": "1"}


class MedusaVllmFormat(MedusaFormat):
    """Medusa's layout as vLLM names it. Matrices may be of some tokens, which `token_map` names."""

    name = "medusa-vllm"
    heads = "num_heads"
    layers = "num_hidden_layers"
    block = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.weight")

    def load_head(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        shape = target_shape(target)
        sizes = {"hidden_size": shape.hidden, "vocab_size": shape.vocab}
        checkpoint.check_sizes(checkpoint.config, sizes)
        checkpoint.drop_prefix("medusa_heads.")
        return super().load_head(checkpoint, target, taps)

    def block_name(self, head: int, layer: int) -> str:
        return f"blocks.{head}.layers.{layer}"

    def has_bias(self, checkpoint: Checkpoint) -> bool:
        """Only where its configuration says so."""
        return bool(checkpoint.config.get("medusa_fc_bias"))

    def read_kept_tokens(self, checkpoint: Checkpoint, target: Any) -> torch.Tensor | None:
        vocab_size = checkpoint.config.get("truncated_vocab_size", target.vocab)
        if vocab_size == target.vocab:
            return None
        if TOKENS not in checkpoint:
            raise checkpoint.bad_model(
                f"truncated_vocab_size={vocab_size!r}, and lacks {TOKENS}; fetch it again"
            )
        kept_tokens = checkpoint.read_tensor(TOKENS).long()
        if kept_tokens.shape != (vocab_size,):
            complaint = (
                f"{TOKENS} is {tuple(kept_tokens.shape)}, and truncated_vocab_size={vocab_size!r}"
            )
            raise checkpoint.bad_model(complaint)
        kept_tokens = kept_tokens.sort()[0]
        if (
            int(kept_tokens[0]) < 0
            or int(kept_tokens[-1]) >= target.vocab
            or bool((kept_tokens[1:] == kept_tokens[:-1]).any())
        ):
            raise checkpoint.bad_model(
                f"{TOKENS}: must name tokens below {target.vocab}, each once"
            )
        return kept_tokens

    def matrix_names(
        self,
        checkpoint: Checkpoint,
        target: Any,
        kept_tokens: torch.Tensor | None,
        heads: int,
        layers: int,
    ) -> list[str]:
        names = [f"lm_heads.{i}.weight" for i in range(heads)]
        scale = checkpoint.config.get("logit_scale", 1.0)
        uses_original = bool(checkpoint.config.get("original_lm_head"))
        if uses_original or not any(name in checkpoint for name in names):
            if scale != 1:
                raise checkpoint.bad_model(f"logit_scale={scale!r}, and its matrix is the target's")
            for name in sorted({"lm_head.weight", names[0]} & checkpoint.shapes.keys()):
                arranged = self.arrange_matrix(checkpoint, name, kept_tokens)
                if not checkpoint.is_targets(arranged, target, kept_tokens):
                    complaint = f"{name} is not the output matrix of {target.name}"
                    raise checkpoint.bad_model(f"{complaint}; give the model that it was made for")
                del checkpoint.shapes[arranged]
            return []
        is_present = [name in checkpoint for name in names]
        return [
            self.arrange_matrix(checkpoint, name, kept_tokens, float(scale)) if is_there else name
            for name, is_there in zip(names, is_present, strict=True)
        ]

    @staticmethod
    def arrange_matrix(
        checkpoint: Checkpoint, name: str, kept_tokens: torch.Tensor | None, scale: float = 1.0
    ) -> str:
        """The name of the matrix with its rows in the order of the tokens, and scaled."""
        rows: torch.Tensor | None = None
        row_count = checkpoint.shapes[name][0]
        if kept_tokens is not None:
            tokens = checkpoint.read_tensor(TOKENS).long()
            # A matrix of all tokens is cut down to them.
            rows = tokens.argsort() if row_count == len(tokens) else kept_tokens
        if rows is None or int(rows.max()) >= row_count:
            rows = torch.arange(row_count)
        row_order = rows

        def arrange(matrix: torch.Tensor) -> torch.Tensor:
            return matrix[row_order.to(matrix.device)] * scale

        checkpoint.join_tensors(f"{name} in order", [name], arrange)
        return f"{name} in order"

    def known_tensors(self, checkpoint: Checkpoint) -> set[str]:
        return {TOKENS}

    def describe_file(
        self,
        head: Head,
        kept_tokens: torch.Tensor | None,
        target: Any,
        tensors: dict[str, torch.Tensor],
    ) -> tuple[str, dict[str, Any]]:
        shape = head.config.target
        if head.matrix is None:
            tensors["lm_head.weight"] = Output(target, kept_tokens).train_weight()
        else:
            assert isinstance(head.matrix, nn.ModuleList)
            for i in range(len(head.matrix)):
                tensors[f"lm_heads.{i}.weight"] = head.state_dict()[f"matrix.{i}.weight"]
        if kept_tokens is not None:
            tensors[TOKENS] = kept_tokens.long()
        return "model.safetensors", {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab,
            "truncated_vocab_size": shape.vocab if kept_tokens is None else len(kept_tokens),
            "original_lm_head": head.matrix is None,
            "medusa_fc_bias": True,
            "logit_scale": 1.0,
        }
