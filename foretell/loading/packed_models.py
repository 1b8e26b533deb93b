"""Models whose weights are packed, kept in a file: what a second load has to read is little.

A file is found by a digest of what it was made from, the number format, the version of what packs,
and the kernels that rounded; see `packed_files.source_digest` for what that reads. Whatever is
wrong with a file costs a line, and the weights are packed again.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import foretell
from foretell.errors import BadFile
from foretell.loading import packed_files, processes
from foretell.models.decoder.packed import WHOLE_NUMBERS, PackedEmbedding, PackedLinear
from foretell.models.decoder.packed_experts import PackedExperts, is_stacked
from foretell.models.gguf import gguf
from foretell.models.gguf.parts import header_sizes
from foretell.native import library
from foretell.native.arena import ROOMS
from foretell.native.packing import FORMATS, SCALINGS, Packed

VERSION = 2  # of what is kept, and of how it was rounded
LEAST_ROUNDED = 32_000_000  # bytes of weights that are kept where they were rounded,
LEAST_PACKED = 100_000_000  # and where only their order is another one
TABLES = ("table", "fine")
FIELDS = ("bits", "group", "offset", "scaling", "least_scaling")


@dataclass
class Place:
    """Where one model is kept. `name`: of its file; None: it is not kept. `build_empty`: makes the
    model without numbers. `least_bytes`: of its weights; those of a smaller one are not kept.
    """

    name: str | None
    build_empty: Callable[[], Any]
    least_bytes: int

    def find(self) -> Any:
        """The model with the numbers that are kept; None: there are none."""
        if self.name is None or packed_files.most_bytes() == 0:
            return None
        try:
            contents = packed_files.read(self.name)
            return None if contents is None else self._build(contents)
        except BadFile as error:
            reason = str(error).rpartition("; ")[0]
            processes.say(f"{reason}: its weights are packed again")
            with contextlib.suppress(OSError):
                (packed_files.packed_folder() / self.name).unlink()
            return None

    def _build(self, contents: packed_files.Contents) -> Any:
        """Raises BadFile where numbers and model do not belong to each other."""
        assert self.name is not None
        try:
            hf_model = self.build_empty()
            _fill_model(hf_model, contents)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise packed_files.damage(self.name, "it is of another model") from error
        return hf_model

    def keep(self, hf_model: Any) -> bool:
        """Keeps a model that is large enough and can be put together again; a line says where it
        cannot be written.
        """
        if self.name is None or packed_files.most_bytes() == 0:
            return False
        model, tensors = describe_model(hf_model)
        if sum(tensor.nbytes for tensor in tensors.values()) < self.least_bytes:
            return False
        with contextlib.suppress(BadFile):  # it has parts that nobody knows here
            self._build(packed_files.Contents(model, tensors))
            try:
                packed_files.write(self.name, model, tensors)
                return True
            except BadFile as error:
                processes.say(f"packed weights are not kept: {error}")
        return False


def place_of_folder(folder: Path | None, dtype: str, trust_code: bool) -> Place:
    """Where the model of a folder in `dtype` is kept, if that rounds it and transformers' own code
    is all it needs.
    """
    from foretell.loading.classes import build_empty, is_plain

    place = Place(None, partial(build_empty, folder or Path(), torch.bfloat16), LEAST_ROUNDED)
    if folder is None or dtype not in WHOLE_NUMBERS or trust_code:
        return place
    try:
        if not is_plain(folder):
            return place
    except Exception:  # transformers raises nearly anything here, and will again when it reads
        return place
    try:
        sizes = {}
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                sizes[path] = 8 + struct.unpack("<Q", file.read(8))[0]
        for path in (folder / "config.json", folder / "generation_config.json"):
            if path.is_file():
                sizes[path] = path.stat().st_size
        place.name = _name(sizes, dtype)
    except (OSError, struct.error):
        place.name = None
    return place


def place_of_file(file_path: Path) -> Place:
    """Where the model of a .gguf file, in its own formats, is kept."""
    place = Place(None, partial(gguf.build_empty, file_path), LEAST_PACKED)
    with contextlib.suppress(OSError, LookupError):
        place.name = _name(header_sizes(file_path), "stored")
    return place


def _name(sizes: Mapping[Path, int], dtype: str) -> str | None:
    """The name of what is made of files, with the bytes of each one's header. Raises OSError."""
    if not library.is_available():
        return None
    versions = [version(package) for package in ("transformers", "torch")]
    digest = packed_files.source_digest(sizes, dtype, foretell.__version__, *versions)
    kernels = library.kernel_kind()
    return f"{digest[:40]}-{dtype}-v{VERSION}-{library.VERSION}-{kernels}{packed_files.END}"


# --- what a model consists of


def _packed_parts(hf_model: Any) -> tuple[dict[str, PackedLinear], dict[str, Any] | None]:
    """The packed layers by their paths, and what the embeddings are where they are packed."""
    linears = {
        path: module
        for path, module in hf_model.named_modules()
        if isinstance(module, PackedLinear)
    }
    embedding = hf_model.get_input_embeddings()
    if not isinstance(embedding, PackedEmbedding):
        return linears, None
    table = embedding.head[0]
    paths = {id(linear): path for path, linear in linears.items()}
    path = paths.get(id(table), "")
    if not path:
        linears = {"": table, **linears}
    dtype_name = str(embedding.like.dtype).removeprefix("torch.")
    return linears, {"head": path, "scale": embedding.scale, "dtype": dtype_name}


def describe_model(hf_model: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """All that a model is besides its configuration, for JSON, and its tensors: numbers of matrices
    beside each other, then their scales, then their least values, so that matrices that a step
    joins need not move; then everything else.
    """
    linears, embedding = _packed_parts(hf_model)
    tensors = {
        f"{path}:{room}": values
        for room in ROOMS
        for path, linear in linears.items()
        if (values := getattr(linear.packed, room)) is not None
    }
    trained = []
    for path, linear in linears.items():
        if linear.bias is not None:
            tensors[f"{path}:bias"] = linear.bias
    packed_ids = {id(linear.bias) for linear in linears.values() if linear.bias is not None}
    for path, parameter in hf_model.named_parameters():
        if id(parameter) not in packed_ids:
            tensors[path] = parameter
            trained += [path] if parameter.requires_grad else []
    tensors |= dict(hf_model.named_buffers())
    smoothed = getattr(hf_model, "smoothed", None)
    if smoothed is not None:
        tensors |= {f"{path}:smoothed": factors for path, factors in smoothed.items()}
    model = {
        "linears": {path: _describe_linear(linear) for path, linear in linears.items()},
        "embedding": embedding,
        "experts": {
            path: module.count
            for path, module in hf_model.named_modules()
            if isinstance(module, PackedExperts)
        },
        "trained": trained,
        "smoothed": None if smoothed is None else list(smoothed),
    }
    return model, tensors


def _describe_linear(linear: PackedLinear) -> dict[str, Any]:
    packed = linear.packed
    return {
        "format": packed.format,
        "outputs": packed.outputs,
        "inputs": packed.inputs,
        "in_features": linear.in_features,
        **{name: _numbers_of(getattr(packed, name)) for name in TABLES},
        **{field: getattr(packed, field) for field in FIELDS},
    }


def _table_of(numbers: Any) -> torch.Tensor | None:
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int8)


def _numbers_of(table: torch.Tensor | None) -> list[int] | None:
    return None if table is None else table.tolist()


def _fill_model(hf_model: Any, contents: packed_files.Contents) -> None:
    """Puts what is kept into a model without numbers. Raises ValueError, or what asking for
    something that is not there raises, where they do not belong to each other.
    """
    described, tensors = contents.model, dict(contents.tensors)
    linears = {
        path: _build_linear(path, entry, tensors) for path, entry in described["linears"].items()
    }
    for path, count in described["experts"].items():
        stock = hf_model.get_submodule(path)
        if not is_stacked(stock):
            raise ValueError(f"{path} holds no experts")
        gate, up, down = (linears.pop(f"{path}.{part}") for part in ("gate", "up", "down"))
        act_fn = getattr(stock, "act_fn", None)
        _replace(hf_model, path, PackedExperts(gate, up, down, count, act_fn))
    embedding = described["embedding"]
    if embedding is not None:
        head = linears[embedding["head"]]
        shape = tuple(hf_model.get_input_embeddings().weight.shape)
        if shape != (head.out_features, head.in_features):
            raise ValueError("its embeddings have another shape")
        dtype = packed_files.DTYPES[embedding["dtype"]]
        hf_model.set_input_embeddings(PackedEmbedding(head, dtype, float(embedding["scale"])))
        linears.pop("", None)
    for path, linear in linears.items():
        stock_weight = hf_model.get_submodule(path).weight
        if sorted(stock_weight.shape) != sorted((linear.out_features, linear.in_features)):
            raise ValueError(f"{path} has another shape")
        _replace(hf_model, path, linear)
    if described["smoothed"] is not None:
        hf_model.smoothed = {
            path: tensors.pop(f"{path}:smoothed") for path in described["smoothed"]
        }
    _fill_plain(hf_model, tensors, set(described["trained"]))


def _build_linear(
    path: str, entry: Mapping[str, Any], tensors: dict[str, torch.Tensor]
) -> PackedLinear:
    if entry["format"] not in FORMATS or not {entry["scaling"], entry["least_scaling"]} <= {
        *SCALINGS
    }:
        raise ValueError(f"{path} has a format that is unknown")
    packed = Packed(
        entry["format"],
        int(entry["outputs"]),
        int(entry["inputs"]),
        tensors.pop(f"{path}:weights"),
        tensors.pop(f"{path}:scales", None),
        tensors.pop(f"{path}:minima", None),
        table=_table_of(entry["table"]),
        fine=_table_of(entry["fine"]),
        **{field: entry[field] for field in FIELDS},
    )
    packed.check()
    in_features = int(entry["in_features"])
    if not packed.inputs - 32 < in_features <= packed.inputs:
        raise ValueError(f"{path} has other inputs")
    linear = PackedLinear(packed, tensors.pop(f"{path}:bias", None), in_features)
    linear.settled = True  # a mapped file is read as quickly as large pages, see docs/native.md
    return linear


def _fill_plain(hf_model: Any, tensors: dict[str, torch.Tensor], trained: set[str]) -> None:
    """Fills all that is not packed."""
    stocks = dict(hf_model.named_parameters()) | dict(hf_model.named_buffers())
    if stocks.keys() != tensors.keys():
        raise ValueError("it has other parts")
    for path, stock in stocks.items():
        if stock.shape != tensors[path].shape:
            raise ValueError(f"{path} has another shape")
        value = tensors[path]
        if isinstance(stock, nn.Parameter):
            value = nn.Parameter(value, requires_grad=path in trained)
        _replace(hf_model, path, value)


def _replace(hf_model: Any, path: str, value: Any) -> None:
    parent_path, _, name = path.rpartition(".")
    setattr(hf_model.get_submodule(parent_path), name, value)
