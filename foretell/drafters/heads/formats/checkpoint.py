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
from foretell.errors import BadModel, first_message_line
from foretell.models.weights import check_files
from foretell.ops.parsing import parse_json

TABLE = "embed_tokens.weight"
PREFIX = "model."  # some exporters put it in front of all names
# Rows of embeddings are the target's where their cosine is above this, whatever the number format.
ALIKE = 0.98
SAMPLED = 64  # rows that are compared
MOST = 16  # heads of one depth each, and layers of one


class Checkpoint:
    """A folder's configuration, and its tensors by name without a leading `model.`, read on demand.

    Raises BadModel where files are missing or damaged, or no safetensors.
    """

    def __init__(self, folder: Path):
        other_files = [
            p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")
        ]
        if other_files and not any(folder.glob("*.safetensors")):
            complaint = (
                f"holds only {', '.join(sorted(other_files)[:3])}, which can run code when read"
            )
            cure = "write the tensors as safetensors, as docs/heads.md shows"
            raise BadModel(f"{folder}: {complaint}; {cure}")
        check_files(folder)
        self.folder = folder
        self.config = self._read_config()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, tuple[Path, str]] = {}
        # Tensors that are made of others, and of which.
        self._made: dict[str, tuple[Sequence[str], Callable[..., torch.Tensor]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with open_tensors(path) as file:
                for name in file.keys():  # noqa: SIM118
                    plain_name = name.removeprefix(PREFIX)
                    if plain_name in self._files:
                        raise BadModel(f"{path}: has {plain_name} twice; keep one of them")
                    self._files[plain_name] = (path, name)
                    self.shapes[plain_name] = tuple(file.get_slice(name).get_shape())

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / "config.json"
        try:
            config = dict(parse_json(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise BadModel(
                f"{path}: damaged ({first_message_line(error)}); fetch it again"
            ) from error
        # vLLM wraps the configuration of an EAGLE head.
        inner = config.get("model")
        return {**inner, **config} if isinstance(inner, dict) else config

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read_tensors(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """The tensors under new names, `names` maps theirs to ours: floating ones in float32."""
        tensors = {}
        with ExitStack() as stack:
            files: dict[Path, Any] = {}

            def read_stored(name: str) -> torch.Tensor:
                if name in self._made:
                    parts, make_tensor = self._made[name]
                    return make_tensor(*map(read_stored, parts))
                path, stored_name = self._files[name]
                if path not in files:
                    files[path] = stack.enter_context(open_tensors(path))
                value: torch.Tensor = files[path].get_tensor(stored_name)
                return value.float() if value.is_floating_point() else value

            for their_name, our_name in names.items():
                tensors[our_name] = read_stored(their_name)
        return tensors

    def read_tensor(self, name: str) -> torch.Tensor:
        return self.read_tensors({name: name})[name]

    def join_tensors(
        self, name: str, parts: Sequence[str], make_tensor: Callable[..., torch.Tensor]
    ) -> None:
        """Takes these tensors for one under a new name, `make_tensor` of them when it is read.

        Raises BadModel where one is missing.
        """
        assert name not in self._files, "a made tensor has a name of its own"
        for part in parts:
            if part not in self:
                raise self.bad_model(f"lacks {part}; fetch it again")
        with torch.device("meta"):
            shape = make_tensor(*(torch.empty(self.shapes[part]) for part in parts)).shape
        for part in parts:
            del self.shapes[part]
        self.shapes[name] = tuple(shape)
        self._made[name] = (tuple(parts), make_tensor)

    def drop_prefix(self, prefix: str) -> None:
        """Takes tensors for those of their names without it."""
        for name in [name for name in self.shapes if name.startswith(prefix)]:
            plain_name = name.removeprefix(prefix)
            if plain_name in self._files:
                raise self.bad_model(f"has {plain_name} twice; keep one of them")
            self._files[plain_name] = self._files.pop(name)
            self.shapes[plain_name] = self.shapes.pop(name)

    def check_same(self, names: Sequence[str]) -> None:
        """Raises BadModel where tensors that a head shares differ."""
        first_name, *other_names = names
        for other_name in other_names:
            if not torch.equal(self.read_tensor(first_name), self.read_tensor(other_name)):
                raise self.bad_model(
                    f"{first_name} and {other_name} differ, and a head has them as one"
                )

    def bad_model(self, complaint: str) -> BadModel:
        return BadModel(f"{self.folder}: {complaint}")

    def fill_head(
        self, head: Head, names: Mapping[str, str], used: set[str], filled: Iterable[str] = ()
    ) -> None:
        """Puts tensors into a head, `names` maps theirs to ours; `used`: further ones it knows;
        `filled`: ours that the head has of the target already.

        Raises BadModel, naming the tensor, where one is missing, unknown, damaged or of another
        shape.
        """
        head_state = head.state_dict()
        unknown = sorted(self.shapes.keys() - names.keys() - used)
        if unknown:
            raise self.bad_model(f"has {unknown[0]}, which a head of kind {head.kind} has not")
        for their_name, our_name in names.items():
            if their_name not in self:
                raise self.bad_model(f"lacks {their_name}; fetch it again")
            expected_shape, actual_shape = (
                tuple(head_state[our_name].shape),
                self.shapes[their_name],
            )
            if expected_shape != actual_shape:
                raise self.bad_model(
                    f"{their_name} is {actual_shape}, and its config.json says {expected_shape}"
                )
        filled_state = {name: head_state[name] for name in filled}
        mapped_names = {*names.values(), *filled_state}
        assert mapped_names == head_state.keys(), "a format maps all tensors of a head"
        read_tensors = self.read_tensors(names)
        for their_name, our_name in names.items():
            if not read_tensors[our_name].isfinite().all():
                raise self.bad_model(
                    f"{their_name} is damaged (numbers that are not finite); fetch it again"
                )
        head.load_state_dict({**filled_state, **read_tensors})

    def check_tokens(self, target: Any) -> None:
        """Raises BadModel where embeddings or a tokenizer in the folder are not the target's."""
        if TABLE in self:
            self.check_table(TABLE, target)
        path = self.folder / "tokenizer.json"
        if not path.is_file() or target.tokenizer is None:
            return
        try:
            described = parse_json(path.read_text("utf-8"))
            words = described["model"]["vocab"]
        except (ValueError, LookupError, TypeError) as error:
            raise BadModel(
                f"{path}: damaged ({first_message_line(error)}); fetch it again"
            ) from error
        if isinstance(words, dict):
            added = {part["content"]: part["id"] for part in described.get("added_tokens") or []}
            if {**words, **added} != target.tokenizer.get_vocab():
                raise BadModel(f"{path}: tokenizer is not that of {target.name}; give its model")

    def check_table(self, name: str, target: Any) -> None:
        """Raises BadModel where this is not the target's table of embeddings."""
        table = self.read_tensor(name)
        rows = torch.linspace(0, min(len(table), target.vocab) - 1, SAMPLED).long()
        target_rows = target.embedded(rows.to(target.device)).float().cpu()
        if table.shape[1:] != target_rows.shape[1:] or len(table) < target.vocab:
            expected_shape = (target.vocab, target_rows.shape[1])
            complaint = f"{name} is {tuple(table.shape)}"
            raise self.bad_model(
                f"{complaint}, and {target.name} has {expected_shape}; give the model it is for"
            )
        similarity = torch.cosine_similarity(table[rows], target_rows, dim=-1).median()
        if not similarity > ALIKE:
            complaint = f"{name} is not the table"
            raise self.bad_model(
                f"{complaint} of {target.name}; give the model that it was made for"
            )

    def is_targets(self, name: str, target: Any, kept_tokens: torch.Tensor | None = None) -> bool:
        """Whether a matrix is the target's output matrix, or its rows of these tokens (Vd,)."""
        rows = target.vocab if kept_tokens is None else len(kept_tokens)
        if len(self.shapes[name]) != 2 or self.shapes[name][0] != rows:
            return False
        sampled_rows = torch.linspace(0, rows - 1, min(rows, SAMPLED)).long()
        target_rows = (
            Output(target, sampled_rows if kept_tokens is None else kept_tokens[sampled_rows])
            .train_weight()
            .cpu()
        )
        file_rows = self.read_tensor(name)[sampled_rows]
        if file_rows.shape != target_rows.shape:
            return False
        return bool(torch.cosine_similarity(file_rows, target_rows, dim=-1).median() > ALIKE)

    def whole_number(self, fields: Mapping[str, Any], name: str, minimum: int, maximum: int) -> int:
        """A field of the configuration. Raises BadModel."""
        value = fields.get(name)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.bad_model(f"{name}={value!r} must be a number from {minimum} to {maximum}")
        return value

    def counted(self, numbers: set[int], field: str, part_name: str) -> int:
        """How many of something the file has: often more than a field of the configuration says,
        never fewer. Raises BadModel.
        """
        declared = self.config.get(field, 1)
        if numbers != set(range(len(numbers))):
            missing = min(set(range(len(numbers))) - numbers)
            raise self.bad_model(f"lacks {part_name} {missing}; fetch it again")
        if type(declared) is not int or declared < 1:
            raise self.bad_model(f"{field}={declared!r} must be a number from 1")
        if declared > len(numbers):
            raise self.bad_model(
                f"{field}={declared}, and the file has {len(numbers)}; fetch it again"
            )
        if len(numbers) > MOST:
            part_name = f"the file has {len(numbers)} of {field}"
            raise self.bad_model(f"{part_name}, and this version loads {MOST} at most")
        return len(numbers)

    def part_numbers(self, pattern: str) -> set[int]:
        """Numbers in the place of the pattern's one group, in the names that match it."""
        matches = (re.fullmatch(pattern, name) for name in self.shapes)
        return {int(match[1]) for match in matches if match}

    def check_sizes(self, fields: Mapping[str, Any], expected_sizes: Mapping[str, int]) -> None:
        """Raises BadModel where fields of the configuration are not the target's."""
        for name, size in expected_sizes.items():
            if fields.get(name, size) != size:
                complaint = f"{name}={fields[name]!r}, and the target has {size}"
                raise self.bad_model(f"{complaint}; give the model it is for")


def open_tensors(path: Path) -> Any:
    """A file of tensors. Raises BadModel."""
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise BadModel(
            f"{path}: cannot be read ({first_message_line(error)}); fetch it again"
        ) from error


def layer_options(
    checkpoint: Checkpoint, config: Mapping[str, Any], target: TargetShape
) -> dict[str, Any]:
    """Fields of a published head's layer, llama's configuration, that differ from the target's.

    The rotation is the head's own, also where its configuration names none. Raises BadModel.
    """

    def read_field(name: str, default: Any = None) -> Any:
        value = config.get(name)
        return default if value is None else value

    for name, supported in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("num_hidden_layers", 1),
    ):
        if read_field(name, supported) != supported:
            complaint = f"{name}={config[name]!r}, and this version loads heads of {supported!r}"
            raise checkpoint.bad_model(complaint)
    given_fields = {name: value for name, value in config.items() if value is not None}
    checkpoint.check_sizes(given_fields, {"hidden_size": target.hidden, "vocab_size": target.vocab})
    rope = {**read_field("rope_scaling", {}), **read_field("rope_parameters", {})}
    rotation_kind = rope.get("rope_type", rope.get("type", "default"))
    if rotation_kind != "default":
        raise checkpoint.bad_model(
            f"rope_scaling={rotation_kind!r}, and this version loads none but 'default'"
        )
    try:
        heads = int(read_field("num_attention_heads"))
        layer_fields = {
            "heads": heads,
            "kv_heads": int(read_field("num_key_value_heads", heads)),
            "width": int(read_field("head_dim", target.hidden // heads)),
            "intermediate": int(read_field("intermediate_size")),
            "theta": float(read_field("rope_theta", rope.get("rope_theta", 10_000.0))),
            "eps": float(read_field("rms_norm_eps", 1e-6)),
        }
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise checkpoint.bad_model(
            f"config.json is damaged ({first_message_line(error)})"
        ) from error
    target_layer = target.layer_shape()
    return {
        name: value for name, value in layer_fields.items() if value != getattr(target_layer, name)
    }


def layer_names(theirs: str, ours: str = "layer.") -> dict[str, str]:
    """The tensors of a decoder layer that all layouts name alike."""
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    parts += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    parts.append("post_attention_layernorm")
    return {f"{theirs}{part}.weight": f"{ours}{part}.weight" for part in parts}
