"""Reports what the layers of a model compute and in which numbers, as their descriptions say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from foretell.models.decoder.fused import Fused
from foretell.models.decoder.packed import PackedLinear
from foretell.models.families.description import (
    ExpertsDescription,
    LayerDescription,
    find_family,
)

if TYPE_CHECKING:
    from foretell.models.decoder.decoder import Decoder


@dataclass(frozen=True)
class LayerReport:
    """What the layers of a decoder compute. Text of a value names its layers where others have
    another one.
    """

    described_by: str  # the family's file, or what stands in its place
    differences: tuple[tuple[str, str], ...]  # (field of a description, value), from a llama layer
    experts: tuple[tuple[str, str], ...]  # (field of their description, value)
    windows: str  # tokens that a node sees back
    matrices: tuple[tuple[str, int, int], ...]  # (number format, how many, bytes)


def report_layers(decoder: Decoder) -> LayerReport:
    """The report of a decoder's layers."""
    descriptions = []
    if decoder.loop is not None:
        blocks = decoder.loop.blocks
        descriptions = [block.description for block in blocks if isinstance(block, Fused)]
    windows = "" if decoder.loop is None else _text_of_windows(decoder.loop.windows)
    return LayerReport(
        _text_of_source(decoder, bool(descriptions)),
        tuple(_differences(descriptions)),
        tuple(_experts(descriptions)),
        windows,
        _count_matrices(decoder.hf),
    )


def _text_of_source(decoder: Decoder, is_described: bool) -> str:
    if not is_described:
        return "none: the model's own layers compute"
    describe = find_family(decoder.config.model_type)
    if describe is None:
        return "none: they have the parts of a llama layer"
    return f"{describe.__module__.replace('.', '/')}.py"


def _differences(descriptions: Sequence[LayerDescription]) -> list[tuple[str, str]]:
    """The fields in which layers differ from llama's, with their values; experts aside."""
    names = dict.fromkeys(name for described in descriptions for name in described.differences())
    found = []
    for name in names:
        if name != "experts":
            text = _text_by_layer([getattr(described, name) for described in descriptions])
            found.append((name, text))
    return found


def _experts(descriptions: Sequence[LayerDescription]) -> list[tuple[str, str]]:
    """How many experts compute a token, of how many, and what else the usual ones do not do."""
    layers = [described.experts for described in descriptions]
    experts = next((one for one in layers if one is not None), None)
    if experts is None:
        return []
    with_experts = [number for number, one in enumerate(layers) if one is not None]
    found = [("chosen", f"{experts.chosen} of {experts.count} a token")]
    if len(with_experts) < len(layers):
        found.append(("layers", _text_of_ranges(with_experts)))
    usual = ExpertsDescription(experts.count, experts.chosen)
    for field in fields(experts):
        value = getattr(experts, field.name)
        if value != getattr(usual, field.name):
            found.append((field.name, _text_of_value(value)))
    return found


def _text_of_windows(windows: Sequence[int | None]) -> str:
    return _text_by_layer(windows, lambda window: f"{window:,} tokens" if window else "none")


def _text_of_value(value: Any) -> str:
    return "none" if value in ("", None) else str(value)


def _text_by_layer(
    values: Sequence[Any], text_of_value: Callable[[Any], str] = _text_of_value
) -> str:
    """Text of the values of layers: one value where all have it, else each with its layers."""
    layers_by_value: dict[Any, list[int]] = {}
    for layer, value in enumerate(values):
        layers_by_value.setdefault(value, []).append(layer)
    if len(layers_by_value) == 1:
        return text_of_value(values[0])
    parts = [
        f"{text_of_value(value)} in {_text_of_ranges(layers)}"
        for value, layers in layers_by_value.items()
    ]
    return "; ".join(parts)


def _text_of_ranges(layers: Sequence[int]) -> str:
    """Text of rising numbers of layers: "layers 0 to 4, 6"."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][-1] == layer - 1:
            ranges[-1].append(layer)
        else:
            ranges.append([layer])
    parts = [f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(parts)}"


def _count_matrices(hf_model: Any) -> tuple[tuple[str, int, int], ...]:
    """The number formats of matrices, embeddings included, each memory once."""
    sizes: dict[tuple[int, ...], tuple[str, int]] = {}
    for module in hf_model.modules():
        if isinstance(module, PackedLinear):
            sizes[module.packed.addresses] = module.packed.name, module.packed.nbytes
    for parameter in hf_model.parameters():
        if parameter.ndim > 1:
            name = str(parameter.dtype).removeprefix("torch.")
            sizes[(parameter.data_ptr(),)] = name, parameter.nbytes
    names = dict.fromkeys(name for name, _ in sizes.values())
    by_name = {name: [size for other, size in sizes.values() if other == name] for name in names}
    return tuple((name, len(found), sum(found)) for name, found in by_name.items())
