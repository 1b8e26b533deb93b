"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): words of numbers along the inputs.

A matrix (N, K) of b bits is `qweight` int32 (K b / 32, N), `scales` (G, N), `qzeros` int32 (G,
N b / 32) and, where inputs were taken in an order of their own (act-order), `g_idx` (K,), the group
of each input. Older files hold every zero less one; those of `checkpoint_format` gptq_v2 as it is.
"""

from __future__ import annotations

import torch

from foretell.models.quantized.format import Format, Settings, floats_of
from foretell.models.quantized.matrix import Quantized, unpack_words, word_count
from foretell.models.quantized.tensors import Tensors

QUANT_METHODS = ("gptq",)
BITS = (2, 3, 4, 8)
FORMS = ("gptq", "gptq_v2")


class GPTQ(Format):
    """Reads matrices that GPTQ packed."""

    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, settings: Settings):
        self.bits = settings.choice("bits", BITS)
        self.group = settings.group("group_size")
        self.form = settings.choice("checkpoint_format", FORMS, "gptq")
        if settings.get("is_marlin_format"):
            raise settings.refuse("is_marlin_format", "false: the kernels of Marlin store no rows")
        rules = settings.get("dynamic") or {}
        if not isinstance(rules, dict) or any(not rule.startswith("-:") for rule in rules):
            raise settings.refuse("dynamic", "rules that only leave layers out")

    def read(self, tensors: Tensors, path: str, outputs: int, inputs: int) -> Quantized:
        bits, group = self.bits, self.group if self.group > 0 else inputs
        groups = -(-inputs // group)
        words = tensors.take_sized(
            f"{path}.qweight", (word_count(inputs, bits), outputs), torch.int32
        )
        scales = floats_of(tensors, f"{path}.scales", (groups, outputs))
        zero_words = tensors.take_sized(
            f"{path}.qzeros", (groups, word_count(outputs, bits)), torch.int32
        )
        zeros = unpack_words(zero_words, bits, outputs)
        if self.form == "gptq":
            zeros = zeros + 1 & (1 << bits) - 1
        numbers = unpack_words(words.t(), bits, inputs)
        order = None
        if f"{path}.g_idx" in tensors:
            order = find_order(tensors, f"{path}.g_idx", inputs, group)
        if order is not None:
            numbers = numbers[:, order]
        return Quantized(numbers, bits, group, scales.t(), zeros.t(), order=order)


def find_order(tensors: Tensors, name: str, inputs: int, group: int) -> torch.Tensor | None:
    """Returns the inputs in the order of their groups; None: they lie in it. Raises LookupError."""
    groups = tensors.take_sized(name, (inputs,), torch.int32, torch.int64).long()
    expected = torch.arange(inputs) // group
    if torch.equal(groups, expected):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], expected):
        raise LookupError(f"{name} puts other than {group} inputs into a group")
    return order
