"""What the C library is given is looked at before it is used: an id, a row, a position or a size
that is beyond what there is ends in an exception, and no memory outside is read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from foretell.backends.native import NativeBackend
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.models.decoder.packed import PackedEmbedding, PackedLinear, pack_layers
from foretell.native import library, rows, steps
from foretell.native.packing import Packed
from foretell.native.rounding import quantize_matrix
from tests.models.decoder import families
from tests.native.machines import built, no_library

pytestmark = built
HUGE = 1 << 40
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 400}


def matrix(form: str = "int8", outputs: int = 40, inputs: int = 64) -> Packed:
    torch.manual_seed(0)
    return quantize_matrix(torch.randn(outputs, inputs), form)


# --- rows by number


@pytest.mark.parametrize("wrong", [40, -1, HUGE, -HUGE, 1 << 32])
@pytest.mark.parametrize("form", ["int8", "int4", "bfloat16"])
def test_a_row_that_a_matrix_has_not_is_refused(form: str, wrong: int) -> None:
    with pytest.raises(IndexError, match="ft_rows_of: a token, row, layer or position"):
        library.read_matrix_rows(library.describe_matrix(matrix(form)), torch.tensor([3, wrong, 0]))


@pytest.mark.parametrize("wrong", [40, -1, -HUGE])
def test_so_is_an_embedding_that_there_is_not_with_and_without_the_library(wrong: int) -> None:
    table = PackedEmbedding(PackedLinear(matrix(), None, 64), torch.bfloat16)
    ids = torch.tensor([[0, wrong]])
    with pytest.raises(IndexError):
        table(ids)
    with no_library(), pytest.raises(IndexError):
        table(ids)


def test_a_matrix_of_other_numbers_than_it_says_is_refused() -> None:
    short = matrix()
    short.weights = short.weights[:-16]
    few = matrix("int4")
    assert few.scales is not None
    few.scales = few.scales[:1]
    bare = matrix()
    bare.scales = None
    for packed in (short, few, bare):
        with pytest.raises(ValueError, match="has weights"):
            library.describe_matrix(packed)
    with pytest.raises(ValueError, match=r"is \(39,\)"):
        library.describe_matrix(matrix(), torch.zeros(39))


@pytest.mark.parametrize(
    "field, value",
    [
        ("format", 5),
        ("format", -1),
        ("inputs", 33),
        ("inputs", 0),
        ("blocks", 4),
        ("weights", None),
        ("bits", 7),
        ("bits", 0),
        ("bits", 1 << 20),
        ("group", 0),
        ("group", 16),
        ("group", 48),
        ("group", 128),
        ("group", -32),
        ("offset", -1),
        ("offset", 256),
        ("scaling", 0),
        ("scaling", 2),
        ("scaling", 6),
        ("scaling", 7),
        ("scaling", -1),
        ("least_scaling", 1),
        ("least_scaling", 7),
        ("scales", None),
        ("minima", 64),
        ("table", 64),
    ],
)
def test_so_is_a_structure_whose_sizes_do_not_belong_together(field: str, value: Any) -> None:
    made = library.describe_matrix(matrix())
    setattr(made, field, value)
    with pytest.raises(ValueError, match="sizes do not belong"):
        library.load_kernels().ft_rows_of(made, torch.tensor([0]).data_ptr(), 1, None)
    with pytest.raises(ValueError, match="sizes do not belong"):
        library.load_kernels().ft_product(made, None, 1, None, 1)


def test_rows_of_another_width_have_no_product() -> None:
    for x in (torch.zeros(2, 63), torch.zeros(2, 64).double(), torch.zeros(64, 2).t()):
        with pytest.raises(ValueError, match=r"reads|lie in one piece"):
            library.multiply_rows(library.describe_matrix(matrix()), x, 1)


# --- whole steps


@cache
def backend() -> NativeBackend:
    hf = families.tiny("llama", dtype=torch.bfloat16, **SIZES)
    pack_layers(hf, "int8")
    decoder = Decoder(hf, "tiny", fused_blocks)
    decoder.use(NativeBackend)
    found: Any = decoder.backend
    found.decoder = decoder
    return found  # type: ignore[no-any-return]


class Spoilt:
    """The library, to which a step is given after it was spoilt."""

    def __init__(self, spoil: Callable[[steps.Step], Any]):
        self.spoil = spoil

    def __getattr__(self, name: str) -> Any:
        call = getattr(steps.open_library(), name)

        def spoilt(of: Any, step: steps.Step, *more: Any) -> Any:
            held = self.spoil(step)
            result = call(of, step, *more)
            del held
            return result

        return spoilt


def forward(spoil: Callable[[steps.Step], Any], follow: int = 0) -> Any:
    """A tree of 3 nodes after a text of 4, after its step was spoilt."""
    found = backend()
    decoder: Decoder = found.decoder  # type: ignore[attr-defined]
    ask = Ask(TokenTree(5).chain([] if follow else [6, 7]), follow=follow)
    job, _ = decoder.cache().prepare(ask, [1, 2, 3, 5], 4)
    try:
        found.library = Spoilt(spoil)
        return decoder.forward([job])
    finally:
        found.library = steps.open_library()
        job.cache.drop()


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def of_step(field: str, *values: int) -> Callable[[steps.Step], Any]:
    """Puts these numbers into the place of a list of a step."""

    def spoil(step: steps.Step) -> Any:
        held = numbers(*values)
        setattr(step, field, held.ctypes.data)
        return held

    return spoil


def of_job(field: str, value: Any) -> Callable[[steps.Step], Any]:
    def spoil(step: steps.Step) -> Any:
        held = numbers(*value) if isinstance(value, list) else value
        setattr(step.jobs[0], field, held.ctypes.data if isinstance(value, list) else value)
        return held

    return spoil


@pytest.mark.parametrize("value", [-1, 1 << 20, 2**31 - 1])
@pytest.mark.parametrize("field", ["rows", "layers"])
def test_rows_and_layers_that_a_step_has_not_are_refused(field: str, value: int) -> None:
    with pytest.raises(IndexError, match="ft_forward"):
        forward(of_step(field, *[value] * 8))


@pytest.mark.parametrize("value", [-1, 1 << 20])
def test_so_are_positions_beyond_the_rotation_s(value: int) -> None:
    with pytest.raises(IndexError, match="ft_forward"):
        forward(of_job("positions", [value] * 8))


@pytest.mark.parametrize(
    "field, value",
    [
        *(("room", 3), ("room", -1), ("start", -1), ("start", 1 << 30), ("nodes", 0)),
        *(("nodes", 1 << 20), ("base", -1), ("base", 1 << 20), ("segments", 33), ("keys", None)),
        *(("segments", -1), ("values", None), ("positions", None)),
    ],
)
def test_so_are_sizes_of_a_job_that_its_memory_has_not(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match="ft_forward: sizes do not belong to each other"):
        forward(of_job(field, value))


@pytest.mark.parametrize(
    "field, value",
    [
        *(("nodes", 2), ("nodes", 1 << 20), ("job_count", 0), ("row_count", 1 << 20)),
        *(("tap_count", -1), ("layer_count", -1), ("states", None), ("rotations", None)),
        *(("logits", None), ("jobs", None)),
    ],
)
def test_so_are_sizes_of_a_step(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match="ft_forward: sizes do not belong to each other"):
        forward(lambda step: setattr(step, field, value))


@pytest.mark.parametrize(
    "field, value", [("heads", 5), ("kv_heads", 0), ("hidden", 96), ("width", 64), ("layers", 0)]
)
def test_so_is_a_model_whose_matrices_are_of_other_sizes(field: str, value: int) -> None:
    described = backend().model
    before = getattr(described, field)
    setattr(described, field, value)
    try:
        with pytest.raises(ValueError, match=r"sizes|the library reads"):
            forward(lambda step: None)
    finally:
        setattr(described, field, before)


def test_a_step_that_is_as_it_was_runs() -> None:
    assert forward(lambda step: None)[0].logits.isfinite().all()


# --- rows that are read


def attention(**more: Any) -> torch.Tensor:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 40, 32)
    return rows.attend_rows(torch.randn(4, 3, 32), keys, values, 0.1, **more)


def lists(*pages: int) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int32).expand(2, 3, -1)


@pytest.mark.parametrize("pages", [(0, 10), (-1, 3), (2, 1 << 30)])
def test_a_page_that_a_cache_has_not_is_refused(pages: tuple[int, ...]) -> None:
    assert attention(lists=lists(0, 3), page=4, first_row=36).shape == (3, 4, 32)
    with pytest.raises(IndexError, match="ft_read"):
        attention(lists=lists(*pages), page=4, first_row=36)


@pytest.mark.parametrize("page, first", [(0, 36), (-4, 36), (4, 41), (4, -1), (4, 7)])
def test_so_are_more_rows_than_there_are(page: int, first: int) -> None:
    with pytest.raises(ValueError, match="ft_read"):
        attention(lists=lists(0, 1), page=page, first_row=first)


@pytest.mark.parametrize(
    "more",
    [
        {"mask": torch.zeros(3, 39)},
        {"mask": torch.zeros(2, 3, 40)},
        {"read_mask": torch.ones(2, 3, 39, dtype=torch.bool)},
        {"read_mask": torch.ones(3, 3, 40, dtype=torch.bool)},
        {"lists": torch.zeros(3, 3, 2, dtype=torch.int32)},
        {"lists": torch.zeros(2, 4, 2, dtype=torch.int32)},
        {"weights": torch.zeros(2, 3, 39)},
        {"weights": torch.zeros(2, 3, 40).double()},
        {"log_sums": torch.zeros(4, 3)},
    ],
)
def test_so_are_tensors_of_another_shape(more: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError):
        attention(**more)


def test_so_are_queries_and_keys_that_do_not_belong_together() -> None:
    keys = torch.zeros(2, 40, 32)
    for q in (torch.zeros(3, 3, 32), torch.zeros(4, 3, 31), torch.zeros(1, 3, 32)):
        with pytest.raises(ValueError):
            rows.attend_rows(q, keys, keys, 0.1)
        with pytest.raises(ValueError):
            rows.key_products(q, keys)
    with pytest.raises(ValueError):
        rows.attend_rows(torch.zeros(4, 3, 32), keys, keys[:, :39], 0.1)
    with pytest.raises(ValueError):
        rows.key_products(torch.zeros(4, 3, 32), keys, torch.zeros(4, 3, 39))


@pytest.mark.parametrize("count", [0, -1, 9])
def test_no_more_are_chosen_than_there_are(count: int) -> None:
    with pytest.raises(ValueError, match="ft_highest"):
        rows.highest_positions(torch.zeros(2, 8), count)
    with pytest.raises(ValueError, match="ft_best"):
        rows.best_logits(torch.zeros(2, 8), count)
    with pytest.raises(ValueError, match="reads"):
        rows.best_logits(torch.zeros(2, 8), 1, torch.zeros(1))


def test_marks_of_another_length_leave_nothing_out() -> None:
    with pytest.raises(ValueError, match="reads"):
        rows.mask_logits(torch.zeros(8), torch.ones(7, dtype=torch.bool))
    with pytest.raises(ValueError, match="not read"):
        rows.draw_token(torch.zeros(8).double(), 0.5)
    with pytest.raises(ValueError, match="not read"):
        rows.nucleus_logits(torch.zeros(16)[::2], 0.5)
