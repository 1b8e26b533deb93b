"""A folder of a published head, before it is known whose layout it has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from foretell.errors import BadModel, first_line
from foretell.folders import check_files
from foretell.heads.base import Head, TargetShape

PREFIX = "model."  # some exporters put it in front of all names
# Rows of embeddings are the target's where their cosine is above this, whatever the number format.
ALIKE = 0.98
SAMPLED = 64  # rows that are compared


class Checkpoint:
    """Its configuration, and its tensors by name without a leading `model.`; read when asked for.

    Raises BadModel where files are missing or damaged, or no safetensors.
    """

    def __init__(self, folder: Path):
        check_files(folder)
        self.folder = folder
        self.config = self._config()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, tuple[Path, str]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    plain = name.removeprefix(PREFIX)
                    if plain in self._files:
                        raise BadModel(f"{path}: has {plain} twice; keep one of them")
                    self._files[plain] = (path, name)
                    self.shapes[plain] = tuple(file.get_slice(name).get_shape())

    def _config(self) -> dict[str, Any]:
        path = self.folder / "config.json"
        try:
            config = dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise BadModel(f"{path}: damaged ({first_line(error)}); fetch it again") from error
        # vLLM wraps the configuration of an EAGLE head.
        inner = config.get("model")
        return {**inner, **config} if isinstance(inner, dict) else config

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """The tensors under new names, `names` maps theirs to ours: floating ones in float32."""
        found = {}
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for theirs, ours in names.items():
                path, stored = self._files[theirs]
                if path not in files:
                    files[path] = stack.enter_context(opened(path))
                value = files[path].get_tensor(stored)
                found[ours] = value.float() if value.is_floating_point() else value
        return found

    def tensor(self, name: str) -> torch.Tensor:
        return self.read({name: name})[name]

    def bad(self, what: str) -> BadModel:
        return BadModel(f"{self.folder}: {what}")

    def fill(
        self, head: Head, names: Mapping[str, str], used: set[str], filled: Iterable[str] = ()
    ) -> None:
        """Puts tensors into a head, `names` maps theirs to ours; `used`: further ones it knows;
        `filled`: ours that the head has of the target already.

        Raises BadModel, naming the tensor, where one is missing, unknown or of another shape.
        """
        own = head.state_dict()
        unknown = sorted(self.shapes.keys() - names.keys() - used)
        if unknown:
            raise self.bad(f"has {unknown[0]}, which a head of kind {head.kind} has not")
        for theirs, ours in names.items():
            if theirs not in self:
                raise self.bad(f"lacks {theirs}; fetch it again")
            wanted, found = tuple(own[ours].shape), self.shapes[theirs]
            if wanted != found:
                raise self.bad(f"{theirs} is {found}, and its config.json says {wanted}")
        kept = {name: own[name] for name in filled}
        mapped = {*names.values(), *kept}
        assert mapped == own.keys(), "a format maps all tensors of a head"
        head.load_state_dict({**kept, **self.read(names)})

    def check_tokens(self, target: Any) -> None:
        """Raises BadModel where embeddings or a tokenizer in the folder are not the target's."""
        if "embed_tokens.weight" in self:
            self._check_embeddings(target)
        path = self.folder / "tokenizer.json"
        if not path.is_file() or target.tokenizer is None:
            return
        try:
            described = json.loads(path.read_text("utf-8"))
            words = described["model"]["vocab"]
        except (ValueError, LookupError, TypeError) as error:
            raise BadModel(f"{path}: damaged ({first_line(error)}); fetch it again") from error
        if isinstance(words, dict):
            added = {part["content"]: part["id"] for part in described.get("added_tokens") or []}
            if {**words, **added} != target.tokenizer.get_vocab():
                raise BadModel(f"{path}: tokenizer is not that of {target.name}; give its model")

    def _check_embeddings(self, target: Any) -> None:
        table = self.tensor("embed_tokens.weight")
        rows = torch.linspace(0, min(len(table), target.vocab) - 1, SAMPLED).long()
        ours = target.embedded(rows.to(target.device)).float().cpu()
        if table.shape[1:] != ours.shape[1:] or len(table) < target.vocab:
            wanted = (target.vocab, ours.shape[1])
            what = f"embed_tokens.weight is {tuple(table.shape)}"
            raise self.bad(f"{what}, and {target.name} has {wanted}; give the model it is for")
        alike = torch.cosine_similarity(table[rows], ours, dim=-1).median()
        if not alike > ALIKE:
            what = "embed_tokens.weight is not the table"
            raise self.bad(f"{what} of {target.name}; give the model that it was made for")


def opened(path: Path) -> Any:
    """A file of tensors. Raises BadModel."""
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise BadModel(f"{path}: cannot be read ({first_line(error)}); fetch it again") from error


def layer_options(
    checkpoint: Checkpoint, config: Mapping[str, Any], target: TargetShape
) -> dict[str, Any]:
    """What differs between a published head's layer and the target's, of llama's configuration.

    The rotation is the head's own, also where its configuration names none. Raises BadModel.
    """

    def field(name: str, default: Any = None) -> Any:
        value = config.get(name)
        return default if value is None else value

    for name, supported in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("num_hidden_layers", 1),
    ):
        if field(name, supported) != supported:
            what = f"{name}={config[name]!r}, and this version loads heads of {supported!r}"
            raise checkpoint.bad(what)
    for name, wanted in (("hidden_size", target.hidden), ("vocab_size", target.vocab)):
        if field(name, wanted) != wanted:
            what = f"{name}={config[name]}, and the target has {wanted}; give the model it is for"
            raise checkpoint.bad(what)
    rope = {**field("rope_scaling", {}), **field("rope_parameters", {})}
    turned = rope.get("rope_type", rope.get("type", "default"))
    if turned != "default":
        raise checkpoint.bad(f"rope_scaling={turned!r}, and this version loads none but 'default'")
    try:
        heads = int(field("num_attention_heads"))
        found = {
            "heads": heads,
            "kv_heads": int(field("num_key_value_heads", heads)),
            "width": int(field("head_dim", target.hidden // heads)),
            "intermediate": int(field("intermediate_size")),
            "theta": float(field("rope_theta", rope.get("rope_theta", 10_000.0))),
            "eps": float(field("rms_norm_eps", 1e-6)),
        }
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise checkpoint.bad(f"config.json is damaged ({first_line(error)})") from error
    ours = target.layer()
    return {name: value for name, value in found.items() if value != getattr(ours, name)}


def layer_names(theirs: str, ours: str = "layer.") -> dict[str, str]:
    """The tensors of a decoder layer that all layouts name alike."""
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    parts += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    parts.append("post_attention_layernorm")
    return {f"{theirs}{part}.weight": f"{ours}{part}.weight" for part in parts}
