"""A folder of a published head, before it is known whose layout it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from foretell.drafters.heads.networks.base import Head, TargetShape
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadModel, first_line
from foretell.models.weights import check_files
from foretell.ops.parsing import json_of

TABLE = "embed_tokens.weight"
PREFIX = "model."  # some exporters put it in front of all names
# Rows of embeddings are the target's where their cosine is above this, whatever the number format.
ALIKE = 0.98
SAMPLED = 64  # rows that are compared
MOST = 16  # heads of one depth each, and layers of one


class Checkpoint:
    """Its configuration, and its tensors by name without a leading `model.`; read when asked for.

    Raises BadModel where files are missing or damaged, or no safetensors.
    """

    def __init__(self, folder: Path):
        others = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        if others and not any(folder.glob("*.safetensors")):
            what = f"holds only {', '.join(sorted(others)[:3])}, which can run code when read"
            cure = "write the tensors as safetensors, as docs/heads.md shows"
            raise BadModel(f"{folder}: {what}; {cure}")
        check_files(folder)
        self.folder = folder
        self.config = self._config()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, tuple[Path, str]] = {}
        # Tensors that are made of others, and of which.
        self._made: dict[str, tuple[Sequence[str], Callable[..., torch.Tensor]]] = {}
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
            config = dict(json_of(path.read_text("utf-8")))
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

            def stored(name: str) -> torch.Tensor:
                if name in self._made:
                    parts, made = self._made[name]
                    return made(*map(stored, parts))
                path, own = self._files[name]
                if path not in files:
                    files[path] = stack.enter_context(opened(path))
                value: torch.Tensor = files[path].get_tensor(own)
                return value.float() if value.is_floating_point() else value

            for theirs, ours in names.items():
                found[ours] = stored(theirs)
        return found

    def tensor(self, name: str) -> torch.Tensor:
        return self.read({name: name})[name]

    def join(self, name: str, parts: Sequence[str], made: Callable[..., torch.Tensor]) -> None:
        """Takes these tensors for one under a new name, `made` of them when it is read.

        Raises BadModel where one is missing.
        """
        assert name not in self._files, "a made tensor has a name of its own"
        for part in parts:
            if part not in self:
                raise self.bad(f"lacks {part}; fetch it again")
        with torch.device("meta"):
            shape = made(*(torch.empty(self.shapes[part]) for part in parts)).shape
        for part in parts:
            del self.shapes[part]
        self.shapes[name] = tuple(shape)
        self._made[name] = (tuple(parts), made)

    def drop_prefix(self, prefix: str) -> None:
        """Takes tensors for those of their names without it."""
        for name in [name for name in self.shapes if name.startswith(prefix)]:
            plain = name.removeprefix(prefix)
            if plain in self._files:
                raise self.bad(f"has {plain} twice; keep one of them")
            self._files[plain] = self._files.pop(name)
            self.shapes[plain] = self.shapes.pop(name)

    def check_same(self, names: Sequence[str]) -> None:
        """Raises BadModel where tensors that a head shares differ."""
        first, *others = names
        for other in others:
            if not torch.equal(self.tensor(first), self.tensor(other)):
                raise self.bad(f"{first} and {other} differ, and a head has them as one")

    def bad(self, what: str) -> BadModel:
        return BadModel(f"{self.folder}: {what}")

    def fill(
        self, head: Head, names: Mapping[str, str], used: set[str], filled: Iterable[str] = ()
    ) -> None:
        """Puts tensors into a head, `names` maps theirs to ours; `used`: further ones it knows;
        `filled`: ours that the head has of the target already.

        Raises BadModel, naming the tensor, where one is missing, unknown, damaged or of another
        shape.
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
        read = self.read(names)
        for theirs, ours in names.items():
            if not read[ours].isfinite().all():
                raise self.bad(f"{theirs} is damaged (numbers that are not finite); fetch it again")
        head.load_state_dict({**kept, **read})

    def check_tokens(self, target: Any) -> None:
        """Raises BadModel where embeddings or a tokenizer in the folder are not the target's."""
        if TABLE in self:
            self.check_table(TABLE, target)
        path = self.folder / "tokenizer.json"
        if not path.is_file() or target.tokenizer is None:
            return
        try:
            described = json_of(path.read_text("utf-8"))
            words = described["model"]["vocab"]
        except (ValueError, LookupError, TypeError) as error:
            raise BadModel(f"{path}: damaged ({first_line(error)}); fetch it again") from error
        if isinstance(words, dict):
            added = {part["content"]: part["id"] for part in described.get("added_tokens") or []}
            if {**words, **added} != target.tokenizer.get_vocab():
                raise BadModel(f"{path}: tokenizer is not that of {target.name}; give its model")

    def check_table(self, name: str, target: Any) -> None:
        """Raises BadModel where this is not the target's table of embeddings."""
        table = self.tensor(name)
        rows = torch.linspace(0, min(len(table), target.vocab) - 1, SAMPLED).long()
        ours = target.embedded(rows.to(target.device)).float().cpu()
        if table.shape[1:] != ours.shape[1:] or len(table) < target.vocab:
            wanted = (target.vocab, ours.shape[1])
            what = f"{name} is {tuple(table.shape)}"
            raise self.bad(f"{what}, and {target.name} has {wanted}; give the model it is for")
        alike = torch.cosine_similarity(table[rows], ours, dim=-1).median()
        if not alike > ALIKE:
            what = f"{name} is not the table"
            raise self.bad(f"{what} of {target.name}; give the model that it was made for")

    def is_targets(self, name: str, target: Any, kept: torch.Tensor | None = None) -> bool:
        """Whether a matrix is the target's output matrix, or its rows of these tokens (Vd,)."""
        rows = target.vocab if kept is None else len(kept)
        if len(self.shapes[name]) != 2 or self.shapes[name][0] != rows:
            return False
        places = torch.linspace(0, rows - 1, min(rows, SAMPLED)).long()
        ours = Output(target, places if kept is None else kept[places]).weight().cpu()
        theirs = self.tensor(name)[places]
        if theirs.shape != ours.shape:
            return False
        return bool(torch.cosine_similarity(theirs, ours, dim=-1).median() > ALIKE)

    def whole_number(self, told: Mapping[str, Any], name: str, least: int, most: int) -> int:
        """A field of the configuration. Raises BadModel."""
        value = told.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.bad(f"{name}={value!r} must be a number from {least} to {most}")
        return value

    def counted(self, found: set[int], field: str, what: str) -> int:
        """How many of something the file has: often more than a field of the configuration says,
        never fewer. Raises BadModel.
        """
        told = self.config.get(field, 1)
        if found != set(range(len(found))):
            missing = min(set(range(len(found))) - found)
            raise self.bad(f"lacks {what} {missing}; fetch it again")
        if type(told) is not int or told < 1:
            raise self.bad(f"{field}={told!r} must be a number from 1")
        if told > len(found):
            raise self.bad(f"{field}={told}, and the file has {len(found)}; fetch it again")
        if len(found) > MOST:
            what = f"the file has {len(found)} of {field}"
            raise self.bad(f"{what}, and this version loads {MOST} at most")
        return len(found)

    def numbers(self, pattern: str) -> set[int]:
        """What stands in the place of the one group in the names that fit."""
        found = (re.fullmatch(pattern, name) for name in self.shapes)
        return {int(match[1]) for match in found if match}

    def check_sizes(self, told: Mapping[str, Any], wanted: Mapping[str, int]) -> None:
        """Raises BadModel where fields of the configuration are not the target's."""
        for name, size in wanted.items():
            if told.get(name, size) != size:
                what = f"{name}={told[name]!r}, and the target has {size}"
                raise self.bad(f"{what}; give the model it is for")


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
    told = {name: value for name, value in config.items() if value is not None}
    checkpoint.check_sizes(told, {"hidden_size": target.hidden, "vocab_size": target.vocab})
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
