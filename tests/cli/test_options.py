"""Options that commands share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from foretell import cli
from foretell.cli._options import DEFAULT, SamplingOptions, read_biases, read_schema, split_numbers
from foretell.core.types import Sampling
from foretell.errors import BadConfig


def test_the_options_of_sampling_are_its_fields() -> None:
    python_only = {"logits_processors"}
    fields = {field.name for field in dataclasses.fields(Sampling)} - python_only
    assert {field.name for field in dataclasses.fields(SamplingOptions)} == fields
    given = SamplingOptions().arguments()
    assert Sampling(**given) == DEFAULT


def test_values_out_of_range_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(BadConfig, match="top_p=2"):
        SamplingOptions(top_p=2).arguments()


def test_numbers_and_biases_are_read() -> None:
    assert split_numbers("--requests", "1, 8,", int) == (1, 8)
    assert read_biases(["7=1.5", "8=-inf"]) == {7: 1.5, 8: float("-inf")}
    with pytest.raises(BadConfig, match="--requests 1,x: write numbers separated by commas"):
        split_numbers("--requests", "1,x", int)
    with pytest.raises(BadConfig, match="--logit-bias x=1: write ID=BIAS"):
        read_biases(["x=1"])


def test_forms_are_texts_or_stand_in_files(tmp_path: Path) -> None:
    file = tmp_path / "person.json"
    file.write_text('{"type": "object"}')
    assert read_schema('{"a": 1}') == '{"a": 1}' and read_schema(" true ") == " true "
    assert read_schema(str(file)) == '{"type": "object"}'
    given = SamplingOptions(grammar=str(file)).arguments()
    assert given["grammar"] == '{"type": "object"}' and given["json_schema"] is None
    file.write_text('{"type": ')
    with pytest.raises(
        BadConfig, match=r"--json-schema .*person.json: this is no JSON \(Expecting"
    ):
        read_schema(str(file))
    with pytest.raises(BadConfig, match="--json-schema: this is no JSON"):
        read_schema("{type}")
    file.write_bytes(b"\xff")
    with pytest.raises(BadConfig, match=r"--grammar .*: cannot be read \(it is not UTF-8 text\)"):
        SamplingOptions(grammar=str(file)).arguments()
    with pytest.raises(BadConfig, match=r"--json-schema nowhere: cannot be read \(No such file"):
        SamplingOptions(json_schema="nowhere").arguments()
    with pytest.raises(BadConfig, match="json_schema and regex: a text has one form"):
        SamplingOptions(json_schema="{}", regex="a").arguments()


def test_specs_are_split_at_methods() -> None:
    assert cli.split_specs("ngram,draft:length=2,drafts=3, plain") == [
        "ngram",
        "draft:length=2,drafts=3",
        "plain",
    ]


@pytest.mark.parametrize(
    ("option", "spec", "said"),
    [
        ("--method", "ngram:n=0", "ngram:n=0: must be between 1 and 64"),
        ("--method", "cascade:inner=(ngram:k=x)", "ngram:k='x': must be a value of type int"),
        ("--kv", "snapkv:window=0", "snapkv:window=0: must be at least 1"),
        ("--kv", "snapkv:foo=1", "unknown field of snapkv 'foo'; did you mean pool?"),
        ("--guidance", "cfg:g=x", "cfg:g='x': must be a value of type float"),
        ("--processor", "momentum:zz=1", "unknown field of momentum 'zz'"),
        ("--reward", "length:target=0,weight=2", "length:target=0: must be between 1"),
    ],
)
def test_fields_are_checked_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], option: str, spec: str, said: str
) -> None:
    assert cli.run(["generate", "--model", "nowhere", option, spec, "A text"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {said}") and line.count("\n") == 1
