"""AWQ (Lin et al. 2023, arXiv 2306.00978): words of 8 numbers of 4 bits along the outputs.

A matrix (N, K) is `qweight` int32 (K, N / 8), `qzeros` int32 (G, N / 8) and `scales` (G, N). The
numbers of a word, from its lowest bits on, are those of outputs 0, 2, 4, 6, 1, 3, 5 and 7.
"""

from __future__ import annotations

import torch

from foretell.models.quantized.format import Format, Settings, floats_of
from foretell.models.quantized.matrix import Quantized, unpack_words
from foretell.models.quantized.tensors import Tensors

QUANT_METHODS = ("awq",)
BITS = 4
WORD = 8  # numbers of a word
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each output's number in its word


class AWQ(Format):
    """Reads matrices that AWQ packed for its products of many rows, `version` gemm."""

    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, settings: Settings):
        settings.choice(settings.first("bits", "w_bit"), (BITS,))
        self.group = settings.group(settings.first("group_size", "q_group_size"))
        version = settings.get("version", "gemm")
        if str(version).lower() != "gemm":
            raise settings.refuse("version", "gemm: others lie in the order of their kernels")

    def read(self, tensors: Tensors, path: str, outputs: int, inputs: int) -> Quantized:
        group = self.group if self.group > 0 else inputs
        groups, words = -(-inputs // group), -(-outputs // WORD)
        numbers = _unpack(tensors, f"{path}.qweight", (inputs, words), outputs)
        zeros = _unpack(tensors, f"{path}.qzeros", (groups, words), outputs)
        scales = floats_of(tensors, f"{path}.scales", (groups, outputs))
        return Quantized(numbers.t(), BITS, group, scales.t(), zeros.t())


def _unpack(tensors: Tensors, name: str, shape: tuple[int, int], outputs: int) -> torch.Tensor:
    words = tensors.take_sized(name, shape, torch.int32)
    numbers = unpack_words(words, BITS, shape[1] * WORD).unflatten(1, (-1, WORD))
    return numbers[..., list(PLACES)].flatten(1)[:, :outputs]
