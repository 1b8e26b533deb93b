"""The comparison to the last bit: it passes what does not depend on the forward, and finds what
does.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foretell import wrap
from foretell.audit.bits import compare_steps
from foretell.cache.job import Job
from foretell.core.model import STEP
from foretell.models.decoder.packed import pack_layers
from foretell.testing.toy import Toy
from tests.models.decoder.families import tiny


def test_a_model_of_exact_rows_passes() -> None:
    assert compare_steps(Toy(8), 30, max_length=40) == (30, "")


class LooksBeside(Toy):
    """Its rows depend, in the last bit, on how many nodes the forward has."""

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        logits, hidden = super().run(ids, positions, rows, first, taps)
        if len(STEP.get()) > 1:
            logits = torch.nextafter(logits, torch.tensor(torch.inf, dtype=logits.dtype))
        return logits, hidden


def test_one_bit_is_found_and_named() -> None:
    same, first = compare_steps(LooksBeside(8), 20, max_length=40)
    assert 0 < same < 20
    assert first.startswith("step ") and "of 8 logits differ, by at most" in first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordinary_forwards_are_not_like_that(dtype: torch.dtype) -> None:
    hf = tiny("llama", dtype=dtype, hidden_size=36, intermediate_size=51, head_dim=14)
    pack_layers(hf, "int8")
    same, first = compare_steps(wrap(hf, name="tiny").models["target"], 26, max_length=60)
    assert same < 26
    assert "logits differ, by at most" in first
