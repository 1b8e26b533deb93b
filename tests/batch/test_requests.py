"""Files of requests, good and bad, and what the engine is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.batch.requests import Item, prepare_item, read_requests, seed_of
from foretell.errors import BadFile
from foretell.serve.errors import ApiError
from foretell.serve.served import Served
from tests import tiny
from tests.batch.files import asked, chat, completion, write


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(tiny.lm(draft=False), "some/tiny")


def prepared(served: Served, document: dict[str, Any], method: str = "plain") -> Any:
    item = Item(1, document["custom_id"], document["url"], document["body"])
    return prepare_item(item, served, method)


def test_lines_are_read_and_counted_from_one(tmp_path: Path) -> None:
    file = write(tmp_path / "in", completion("a", "x"), "", "  ", chat("b", "y"))
    found = read_requests(file)
    assert [(item.line, item.custom_id) for item in found.items] == [(1, "a"), (4, "b")]
    assert found.items[0].url == "/v1/completions"
    assert found.items[0].body == {"prompt": "x"}
    assert not found.refused_lines and len(found) == 2


def test_marks_and_line_ends_of_other_systems_do_not_matter(tmp_path: Path) -> None:
    line = json.dumps(completion("a", "x")).encode()
    file = tmp_path / "in"
    file.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line.replace(b'"a"', b'"b"'))
    assert [item.custom_id for item in read_requests(file).items] == ["a", "b"]


def test_the_digest_is_of_every_byte(tmp_path: Path) -> None:
    one = read_requests(write(tmp_path / "one", completion("a", "x"))).digest
    assert read_requests(write(tmp_path / "two", completion("a", "x"))).digest == one
    assert read_requests(write(tmp_path / "two", completion("a", "y"))).digest != one
    assert read_requests(write(tmp_path / "two", completion("a", "x"), "")).digest != one


BAD: list[tuple[Any, str | None, str]] = [
    ('{"custom_id": "a", ', None, "no JSON: Expecting property name .* at character 19"),
    ("[1, 2]", None, "no JSON object"),
    ("null", None, "no JSON object"),
    (b'{"custom_id": "\xff"}', None, "not UTF-8 text .byte 0xff."),
    ("[" * 200_000, None, "no JSON"),
    ('{"a": ' + "9" * 5000 + "}", None, "no JSON"),
    ({"method": "POST", "url": "/v1/completions", "body": {}}, None, "custom_id: is missing"),
    ({**completion("a", "x"), "custom_id": 7}, None, "custom_id: .*valid string"),
    ({**completion("a", "x"), "custom_id": ""}, None, "custom_id: .*at least 1"),
    ({**completion("a", "x"), "method": "GET"}, "a", "method: .*'POST'"),
    (asked("a", "/v1/embeddings"), "a", "url: .*/v1/chat/completions"),
    ({**completion("a", "x"), "body": "x"}, "a", "body: it must be a JSON object"),
    ({**completion("a", "x"), "extra": 1}, "a", "extra: unknown field"),
]


@pytest.mark.parametrize(("line", "custom_id", "message"), BAD)
def test_a_bad_line_is_refused_by_number_and_the_rest_read(
    tmp_path: Path, line: Any, custom_id: str | None, message: str
) -> None:
    found = read_requests(
        write(tmp_path / "in", completion("first", "x"), line, completion("last", "y"))
    )
    assert [item.custom_id for item in found.items] == ["first", "last"]
    (refused,) = found.refused_lines
    assert (refused.line, refused.custom_id) == (2, custom_id)
    with pytest.raises(ApiError, match=message):
        raise refused.error


def test_a_custom_id_that_stands_twice_is_refused_with_its_lines(tmp_path: Path) -> None:
    lines = [completion(name, "x") for name in "abcabb"]
    with pytest.raises(BadFile, match="lines 1 and 4 have the custom_id 'a', lines 2 and 5 and 6"):
        read_requests(write(tmp_path / "in", *lines))
    many = [completion(str(i % 9), "x") for i in range(18)]
    with pytest.raises(BadFile, match="and so on, 9 in all; every request needs"):
        read_requests(write(tmp_path / "in", *many))


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in").write_bytes(content)
    with pytest.raises(BadFile, match="holds no request; write one JSON object a line"):
        read_requests(tmp_path / "in")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(BadFile, match=f"{path}: .*; name a file of requests"):
            read_requests(path)


# --- what the engine is asked


def test_what_is_asked_arrives(served: Served) -> None:
    one = prepared(served, completion("a", "The fox", max_tokens=3, temperature=0, priority=4))
    assert one.call.method == "plain" and one.priority == 4 and one.longest == 3
    assert one.call.prompts == [served.lm.prompt_ids("The fox")]
    assert prepared(served, completion("a", "x", method="ngram")).call.method == "ngram"
    off = prepared(served, completion("a", "x", speculation="off"), "ngram")
    assert off.call.method == "plain"


def test_a_method_of_the_command_line_may_name_files(served: Served) -> None:
    """It is no client's."""
    spec = "rest:path=/some/store.safetensors"
    assert prepared(served, completion("a", "x"), spec).call.method == spec
    with pytest.raises(ApiError, match="files"):
        prepared(served, completion("a", "x", method=spec))


def test_the_seed_of_a_request_is_its_own_and_stays(served: Served) -> None:
    seeds = [prepared(served, completion(name, "x")).call.arguments["seed"] for name in "aba"]
    assert seeds[0] == seeds[2] != seeds[1]
    assert seeds[0] == [seed_of("a")] and 0 <= seed_of("\ud800") < 2**31
    assert prepared(served, completion("a", "x", seed=5)).call.arguments["seed"] == [5]


@pytest.mark.parametrize("model", [None, "some/tiny", "tiny"])
def test_a_request_may_name_the_model_that_runs(served: Served, model: str | None) -> None:
    assert prepared(served, completion("a", "x", model=model)).longest == 16


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "x", "model": "gpt-4o"}, "model: 'gpt-4o' is not what runs here"),
        ({"prompt": "x", "stream": True}, "stream: a batch has none"),
        ({"prompt": "x", "temperature": "hot"}, "temperature: .*number"),
        ({"prompt": "x", "colour": 1}, "colour: unknown field"),
        ({"prompt": "x", "method": "telepathy"}, "telepathy"),
        ({"prompt": [1, 10**6]}, "not in the vocabulary"),
        ({"prompt": "x " * 2000}, "prompt: it has .* tokens"),
        ({}, "prompt: is missing"),
    ],
)
def test_a_body_that_cannot_run_is_refused_by_field(
    served: Served, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError, match=message):
        prepared(served, asked("a", **body))


def test_groups_are_made_by_what_all_prompts_of_a_request_begin_with(served: Served) -> None:
    def beginning(prompt: Any, **more: Any) -> list[int]:
        return list(prepared(served, completion("a", prompt, **more)).shared_beginning())

    assert beginning([1, 2, 3]) == [1, 2, 3]
    assert beginning([[1, 2, 3, 4], [1, 2, 5]]) == [1, 2, 3]
    assert beginning([[1, 2], [1, 2, 5]]) == [1, 2]
    assert beginning([[1, 2], [3, 4]]) == [1]
    assert beginning([1, 2, 3], n=4) == [1, 2, 3]
