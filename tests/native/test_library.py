"""Products of the C library: those of the numbers, the same by every kind of kernel, row by row."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import BadConfig
from foretell.models.decoder.packed import product_by_torch
from foretell.native import library
from foretell.native.packing import (
    GROUP,
    Packed,
    group_scales,
    pack_whole,
    unpack_matrix,
    unpack_numbers,
)
from foretell.native.rounding import DTYPES, best_peaks, best_ranges, quantize_matrix
from tests.native.machines import built, kernels, kinds, no_library

KINDS = kinds()
FORMS = (*DTYPES, "int4 around zero")
LARGE = 70, 1024  # outputs and inputs of more than one task


def matrix(form: str, outputs: int, inputs: int) -> Packed:
    packed = quantize_matrix(torch.randn(outputs, inputs), form.split()[0])
    if form == "int4 around zero":
        packed = pack_whole(unpack_numbers(packed), 4, GROUP, group_scales(packed), offset=8)
    return packed


def product(packed: Packed, x: torch.Tensor, kind: str, threads: int = 1) -> torch.Tensor:
    with kernels(kind):
        return library.multiply_rows(library.describe_matrix(packed), x, threads)


@built
def test_the_quickest_and_the_portable_kernels_run_here() -> None:
    assert library.kernel_kind() == KINDS[0] and KINDS[-1] == "portable"


@built
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 5), st.integers(0, 99))
def test_products_are_those_of_the_numbers(
    kind: str, form: str, rows: int, outputs: int, groups: int, seed: int
) -> None:
    torch.manual_seed(seed)
    packed, x = matrix(form, outputs, groups * GROUP), torch.randn(rows, groups * GROUP)
    ours = product(packed, x, kind)
    if form == "bfloat16":
        exact = x.bfloat16().double() @ unpack_matrix(packed).double().t()
    else:
        parts = x.view(rows, -1, GROUP)
        step = parts.abs().amax(-1, keepdim=True) / 127
        exact = ((parts / step).round() * step).flatten(1).double() @ unpack_matrix(
            packed
        ).double().t()
    assert ours.shape == (rows, outputs)
    # Whole numbers beside a half may round to either neighbour.
    assert (ours - exact).abs().max() <= 1e-3 * exact.abs().max() + 1e-4
    if form != "bfloat16":
        assert torch.equal(ours, product(packed, x, "portable"))
        twin = product_by_torch(packed, x)
        assert (ours - twin).abs().max() <= 1e-5 * twin.abs().max() + 1e-6


@built
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_no_other_row_and_no_thread(kind: str, form: str) -> None:
    torch.manual_seed(0)
    packed, x = matrix(form, *LARGE), torch.randn(19, LARGE[1])
    x[5] *= 1000
    x[6] = 0
    whole = product(packed, x, kind)
    for rows in ([0], [5], [4, 5, 6], list(range(9)), list(range(18, -1, -1))):
        assert torch.equal(product(packed, x[rows], kind), whole[rows])
    assert torch.equal(product(packed, x, kind, threads=2), whole)
    assert not whole[6].any()


@built
def test_groups_of_next_to_nothing_are_zero() -> None:
    """127 over numbers below the normal ones is infinite."""
    x = torch.zeros(1, 64)
    x[0, ::2] = 1e-38
    for form in ("int8", "int4"):
        packed = matrix(form, 20, 64)
        for kind in KINDS:
            assert not product(packed, x, kind).any(), kind
        assert not product_by_torch(packed, x).any()


@built
def test_a_group_s_largest_sums_do_not_overflow() -> None:
    x = torch.full((3, 64), 5.0)
    x[1, ::2] = -5.0
    x[2] = -5.0
    for bits, offset, number in ((8, 128, 1), (8, 128, 255), (4, 8, 15)):
        numbers = torch.full((16, 64), number, dtype=torch.uint8)
        packed = pack_whole(numbers, bits, GROUP, torch.ones(16, 2), offset=offset)
        exact = x @ unpack_matrix(packed).t()
        for name in KINDS:
            assert torch.allclose(product(packed, x, name), exact, rtol=1e-6, atol=1e-3), name


@built
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damaged", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_what_is_no_number_has_no_products(kind: str, form: str, damaged: float) -> None:
    """Damaged weights must show: rounded, they would be some number or other."""
    torch.manual_seed(0)
    packed, x = matrix(form, 20, 128), torch.randn(4, 128)
    whole = product(packed, x, kind)
    x[1, 70] = x[3, 0] = damaged
    ours = product(packed, x, kind)
    assert torch.equal(ours[[0, 2]], whole[[0, 2]])
    assert not ours[[1, 3]].isfinite().any()


@built
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_is_added_and_rows_are_read(kind: str, form: str) -> None:
    torch.manual_seed(0)
    packed, bias = matrix(form, 37, 96), torch.randn(37)
    x = torch.randn(5, 96)
    with kernels(kind):
        biased = library.multiply_rows(library.describe_matrix(packed, bias), x, 1)
        rows = library.read_matrix_rows(
            library.describe_matrix(packed), torch.tensor([36, 0, 15, 16])
        )
        none = library.multiply_rows(library.describe_matrix(packed), x[:0], 1)
    plain = product(packed, x, kind)
    assert torch.allclose(biased, plain + bias, rtol=1e-6, atol=1e-5)
    wanted = unpack_matrix(packed)[[36, 0, 15, 16]].float()
    assert torch.allclose(rows, wanted, rtol=1e-6, atol=1e-7)
    assert none.shape == (0, 37)


@built
def test_a_slip_in_a_product_is_found() -> None:
    """One number, scale or minimum that is another changes the product it belongs to, and none
    else.
    """
    torch.manual_seed(0)
    packed, x = matrix("int4", 32, 64), torch.randn(3, 64)
    before = library.multiply_rows(library.describe_matrix(packed), x, 1)
    assert packed.scales is not None and packed.minima is not None
    for part, at in ((packed.scales, (1, 0, 4)), (packed.minima, (1, 1, 4))):
        old = part[at].clone()
        part[at] += 1
        after = library.multiply_rows(library.describe_matrix(packed), x, 1)
        part[at] = old
        assert (after != before).any(0).nonzero().flatten().tolist() == [20]


def test_it_can_be_turned_off() -> None:
    with no_library(), pytest.raises(LookupError, match="FORETELL_NATIVE=off"):
        library.load_kernels()


@built
def test_kernels_can_be_named_and_wrong_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = library.kernel_kind()
    try:
        monkeypatch.setenv(library.VARIABLE, "portable")
        library.find_library.cache_clear()
        assert library.kernel_kind() == "portable"
        monkeypatch.setenv(library.VARIABLE, "fastest")
        library.find_library.cache_clear()
        with pytest.raises(BadConfig, match="FORETELL_NATIVE='fastest': must be off or one of"):
            library.load_kernels()
    finally:
        monkeypatch.undo()
        library.find_library.cache_clear()
    assert library.kernel_kind() == usual


def test_without_a_build_the_reason_and_the_cure_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foretell.native._library", None)
    library.find_library.cache_clear()
    try:
        with pytest.raises(LookupError, match="not built here: install foretell again"):
            library.load_kernels()
        assert not library.is_available()
    finally:
        monkeypatch.undo()
        library.find_library.cache_clear()


@built
@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e4])
def test_peaks_lose_as_little_as_those_that_torch_finds(kind: str, size: float) -> None:
    torch.manual_seed(0)
    groups = torch.randn(37, 61, 32) * size
    groups[3, 5] = 0
    with kernels(kind):
        found = library.find_peaks(groups)
    wanted = best_peaks(groups)
    assert (found == wanted).float().mean() > 0.99, "but for equally good ones"
    assert int(found[3, 5]) == 127

    def lost(peaks: torch.Tensor) -> torch.Tensor:
        scale = (groups.double().abs().amax(-1) / peaks).clamp_min(1e-40)[..., None]
        return ((groups / scale).round() * scale - groups).square().sum(-1)

    assert (lost(found) <= 1.0001 * lost(wanted)).all()


@built
@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e4])
def test_ranges_lose_as_little_as_those_that_torch_finds(kind: str, size: float) -> None:
    torch.manual_seed(0)
    groups = torch.randn(37, 61, 32) * size
    groups[3, 5] = 0
    groups[4, 6] = size

    def rounded(found: tuple[torch.Tensor, ...]) -> torch.Tensor:
        whole, scale, least = found
        assert whole.dtype == torch.uint8 and int(whole.max()) <= 15
        return whole.double() * scale.double()[..., None] + least.double()[..., None]

    def lost(found: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (rounded(found) - groups).square().sum(-1)

    with kernels(kind):
        found = library.find_ranges(groups)
    wanted = best_ranges(groups)
    assert (lost(found) <= 1.001 * lost(wanted) + 1e-12 * size**2).all()
    assert (found[0] == wanted[0]).all(-1).float().mean() > 0.99, "but for equally good ones"
    assert not rounded(found)[3, 5].any()
    assert torch.allclose(rounded(found)[4, 6], groups[4, 6].double())
