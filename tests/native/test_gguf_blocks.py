"""Every type of a file's numbers comes out of the weight store as its own library reads it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from foretell.models.decoder.packed import PackedEmbedding, PackedLinear, product_by_torch
from foretell.native import library
from foretell.native.gguf_blocks import TYPES, pack_blocks
from foretell.native.packing import Packed, centred_numbers, pack_whole, unpack_matrix
from tests.native.machines import built, kernels, kinds, no_library

pytestmark = built
FLOATS = {"F32": np.float32, "F16": np.float16}
# Places of half-precision numbers in a block, whose random bits could be none.
HALVES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def random_rows(name: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of random bytes, whose halves are numbers from 0.0005 to 0.002 of either sign."""
    generator = np.random.default_rng(seed)
    block_type = TYPES[name]
    if name in FLOATS or name == "BF16":
        numbers = generator.standard_normal((outputs, inputs)).astype(np.float32)
        if name == "BF16":
            return np.ascontiguousarray(numbers.view(np.uint16)[:, 1::2]).view(np.uint8)
        return numbers.astype(FLOATS[name]).view(np.uint8)
    count = inputs // block_type.block
    size = (outputs, count, block_type.block_bytes)
    blocks = generator.integers(0, 256, size, dtype=np.uint8)
    for place in HALVES.get(name, ()):
        blocks[..., place + 1] = 0x10 | blocks[..., place + 1] & 0x87
    if name == "MXFP4":  # of powers beyond those of weights, the least alone
        blocks[..., 0] = np.where(blocks[..., 0] < 8, blocks[..., 0] % 3, 112 + blocks[..., 0] % 8)
    return blocks.reshape(outputs, -1)


def wanted(name: str, rows: np.ndarray) -> torch.Tensor:
    numbers = gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    return torch.from_numpy(np.array(numbers, np.float32))


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.float().contiguous().view(torch.int32)


def all_rows(packed: Packed) -> torch.Tensor:
    """By the C library."""
    matrix = library.describe_matrix(packed)
    return library.read_matrix_rows(matrix, torch.arange(packed.outputs))


@pytest.mark.parametrize("name", TYPES)
def test_all_numbers_are_the_file_s_to_the_last_bit(name: str) -> None:
    for outputs, inputs in ((37, 512), (16, 256)):
        rows = random_rows(name, outputs, inputs, outputs)
        packed = pack_blocks(name, rows, inputs)
        packed.check()
        assert torch.equal(bits(unpack_matrix(packed)), bits(wanted(name, rows)))
        assert torch.equal(bits(all_rows(packed)), bits(wanted(name, rows)))
        block_type = TYPES[name]
        stated = rows.shape[1] * packed.blocks * 16
        if name not in ("Q2_K", "TQ1_0"):  # whose parts of bytes become bytes
            assert packed.nbytes <= 1.04 * stated, block_type


@pytest.mark.parametrize(
    "name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4"]
)
def test_noise_that_was_rounded_comes_back(name: str) -> None:
    noise = np.random.default_rng(1).standard_normal((20, 512)).astype(np.float32)
    rows = gguf.quantize(noise, gguf.GGMLQuantizationType[name])
    packed = pack_blocks(name, rows, 512)
    assert torch.equal(bits(all_rows(packed)), bits(wanted(name, rows)))
    assert (all_rows(packed) - torch.from_numpy(noise)).abs().mean() < 0.75  # of 3 values, else 0.1


@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_the_numbers_row_by_row(name: str) -> None:
    torch.manual_seed(0)
    outputs, inputs = 70, 512
    rows = random_rows(name, outputs, inputs)
    packed, x = pack_blocks(name, rows, inputs), torch.randn(17, inputs)
    x[3] *= 1000
    if packed.is_whole:
        parts = x.view(17, -1, 32)
        step = parts.abs().amax(-1, keepdim=True) / 127
        rounded = ((parts * (1 / step)).round() * step).flatten(1)
    else:
        rounded = x.bfloat16().float() if name == "BF16" else x
    exact = rounded.double() @ wanted(name, rows).double().t()
    size = rounded.double().abs() @ wanted(name, rows).double().abs().t()
    twin = product_by_torch(packed, x)
    assert ((twin - exact).abs() <= 1e-5 * size + 1e-12).all()
    found = []
    for kind in kinds():
        with kernels(kind):
            matrix = library.describe_matrix(packed)
            whole = library.multiply_rows(matrix, x, 2)
            for count in (1, 2, 3, 4, 5, 7, 8, 9, 16):
                assert torch.equal(library.multiply_rows(matrix, x[:count], 1), whole[:count])
            assert torch.equal(library.multiply_rows(matrix, x[3:4], 1), whole[3:4])
        # A number beside a half may be rounded to either neighbour.
        assert ((whole - exact).abs() <= 1e-3 * size + 1e-12).all()
        if name != "BF16" or kind != "avx512_bf16":
            found.append(whole)
    assert all(torch.equal(whole, found[-1]) for whole in found)


@pytest.mark.parametrize("name", TYPES)
def test_parts_and_rows_of_every_layout(name: str) -> None:
    packed = pack_blocks(name, random_rows(name, 53, 256), 256)
    numbers, ids = unpack_matrix(packed), torch.tensor([52, 0, 17, 17, 33])
    taken = packed.take(ids)
    taken.check()
    assert torch.equal(bits(unpack_matrix(taken)), bits(numbers[ids]))
    first, rest = packed.part(0, 32), packed.part(2, 21)
    joined = Packed.join([first, rest])
    assert (
        torch.equal(bits(unpack_matrix(joined)), bits(numbers)) and joined.nbytes == packed.nbytes
    )
    assert first.weights.data_ptr() == packed.weights.data_ptr()
    table = PackedEmbedding(PackedLinear(packed, None, 256), torch.float32)
    assert torch.equal(bits(table(ids)), bits(numbers[ids]))
    with no_library():
        assert torch.equal(bits(table(ids)), bits(numbers[ids]))
    if packed.is_whole:
        whole, width, scales, minima = centred_numbers(packed)
        groups = whole.float().unflatten(1, (-1, packed.group)) - (1 << width - 1)
        near = groups * scales[..., None] + (0 if minima is None else minima[..., None])
        assert torch.allclose(
            near.flatten(1), numbers, rtol=1e-5, atol=1e-5 * float(numbers.abs().max())
        )


def test_zero_points_are_those_of_the_numbers() -> None:
    """What files of GPTQ and AWQ hold: scale * (number - zero point) in long groups."""
    torch.manual_seed(0)
    for width, group in ((4, 128), (8, 64), (3, 32), (2, 128)):
        numbers, points = (
            torch.randint(0, 1 << width, shape, dtype=torch.uint8)
            for shape in ((40, 256), (40, 256 // group))
        )
        scales = torch.rand(points.shape).half() / 100
        packed = pack_whole(numbers, width, group, scales, points)
        spread = [part.float().repeat_interleave(group, 1) for part in (scales, points)]
        exact = spread[0] * (numbers - spread[1])
        assert torch.equal(unpack_matrix(packed), exact) and torch.equal(all_rows(packed), exact)
        x = torch.randn(3, 256)
        for kind in kinds():
            with kernels(kind):
                found = library.multiply_rows(library.describe_matrix(packed), x, 1)
            twin = product_by_torch(packed, x)
            assert (found - twin).abs().max() <= 1e-3 * twin.abs().max()


def test_scales_that_float16_lacks_stay_as_they_are() -> None:
    numbers = torch.randint(0, 16, (20, 64), dtype=torch.uint8)
    packed = pack_whole(numbers, 4, 32, torch.full((20, 2), 1 / 3), torch.full((20, 2), 1 / 7))
    assert (packed.scaling, packed.least_scaling) == ("single", "single")
    assert torch.equal(all_rows(packed), numbers * torch.tensor(1 / 3) + torch.tensor(1 / 7))


def test_rows_go_where_they_are_wanted() -> None:
    rows = random_rows("Q4_K", 40, 256)
    order = torch.tensor([39, 0, 17, 17, 5])
    packed = pack_blocks("Q4_K", rows, 256, order)
    assert packed.outputs == 5
    assert torch.equal(all_rows(packed), wanted("Q4_K", rows)[order])
    for wrong in (40, -1, 1 << 40):
        with pytest.raises(IndexError):
            pack_blocks("Q4_K", rows, 256, torch.tensor([0, wrong]))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_rows_of_floats_are_filled_up_with_zeros(name: str) -> None:
    rows = random_rows(name, 19, 45)
    packed = pack_blocks(name, rows, 45)
    assert packed.inputs == 64
    found = all_rows(packed)
    assert torch.equal(found[:, :45], wanted(name, rows)) and not found[:, 45:].any()


def test_rows_of_another_size_are_refused() -> None:
    rows = random_rows("Q6_K", 4, 256)
    for wrong, inputs in ((rows[:, :-1], 256), (rows, 512), (rows, 255), (rows.view(np.int8), 256)):
        with pytest.raises(ValueError, match="are none of"):
            pack_blocks("Q6_K", wrong, inputs)


@pytest.mark.parametrize(
    "field, value",
    [("type", 99), ("inputs", 512), ("inputs", 0), ("row_count", 5), ("row_bytes", 209)],
)
def test_a_structure_that_says_another_size_is_refused(field: str, value: int) -> None:
    rows = random_rows("Q6_K", 4, 256)
    packed = pack_blocks("Q6_K", rows, 256)
    raw = library.Raw(type=14, inputs=256, row_count=4, rows=rows.ctypes.data, row_bytes=210)
    matrix = library.describe_matrix(packed)
    library.load_kernels().ft_pack(raw, matrix, 1)
    setattr(raw, field, value)
    with pytest.raises(ValueError, match="do not belong"):
        library.load_kernels().ft_pack(raw, matrix, 1)
    raw = library.Raw(type=12, inputs=256, row_count=4, rows=rows.ctypes.data, row_bytes=144)
    with pytest.raises(ValueError, match="do not belong"):
        library.load_kernels().ft_pack(raw, matrix, 1)
