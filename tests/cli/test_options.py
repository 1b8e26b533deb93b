"""Options that commands share."""

from __future__ import annotations

import dataclasses

import pytest

from foretell import cli
from foretell.cli._options import DEFAULT, SamplingOptions, biases, numbers
from foretell.core.types import Sampling
from foretell.errors import BadConfig


def test_the_options_of_sampling_are_its_fields() -> None:
    fields = {field.name for field in dataclasses.fields(Sampling)} - {"logits_processors"}
    assert {field.name for field in dataclasses.fields(SamplingOptions)} == fields
    given = SamplingOptions().arguments()
    assert Sampling(**given) == DEFAULT


def test_values_out_of_range_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(BadConfig, match="top_p=2"):
        SamplingOptions(top_p=2).arguments()


def test_numbers_and_biases_are_read() -> None:
    assert numbers("--requests", "1, 8,", int) == (1, 8)
    assert biases(["7=1.5", "8=-inf"]) == {7: 1.5, 8: float("-inf")}
    with pytest.raises(BadConfig, match="--requests 1,x: write numbers separated by commas"):
        numbers("--requests", "1,x", int)
    with pytest.raises(BadConfig, match="--logit-bias x=1: write ID=BIAS"):
        biases(["x=1"])


def test_specs_are_split_at_methods() -> None:
    assert cli.split_specs("ngram,draft:length=2,drafts=3, plain") == [
        "ngram",
        "draft:length=2,drafts=3",
        "plain",
    ]
