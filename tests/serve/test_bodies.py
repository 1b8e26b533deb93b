"""Bodies within bounds: what is counted, what is refused and when, and in which thread."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import httpx
import pytest

from foretell.serve import bodies, service
from foretell.serve.bodies import DEEPEST, LARGE, Extent
from foretell.serve.errors import ApiError
from foretell.serve.schemas import CompletionRequest, parse_json, parse_request
from tests import tiny
from tests.serve.asked import completion
from tests.serve.live import Live, running

JSON = {"Content-Type": "application/json"}


def extent(text: bytes, size: int) -> Extent:
    found = Extent()
    for start in range(0, len(text), size):
        found.add_part(text[start : start + size])
    return found


def counted(value: Any) -> tuple[int, int]:
    """The same by Python's reader: openings, commas, and depth."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    marks = sum(marks for marks, _ in inner) + 1 + max(0, len(inner) - 1)
    return marks, 1 + max((depth for _, depth in inner), default=0)


def test_a_body_is_counted_in_any_parts() -> None:
    dice = random.Random(0)

    def value(depth: int) -> Any:
        kind = dice.randrange(6 if depth else 3)
        if kind == 0:
            return dice.choice([1, -2.5, None, True])
        if kind < 3:
            return "".join(dice.choices('a"\\[]{},: é🙂\n', k=dice.randrange(9)))
        if kind < 5:
            return [value(depth - 1) for _ in range(dice.randrange(4))]
        return {f'{k}"[\\': value(depth - 1) for k in range(dice.randrange(4))}

    for _ in range(300):
        made = [value(4), {"last": value(3)}]
        text = json.dumps(made, ensure_ascii=dice.random() < 0.5).encode()
        marks, depth = counted(made)
        for size in (1, 2, 3, 7, 10_000):
            found = extent(text, size)
            assert (found.values - 1, found.deepest) == (marks, depth), text


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b'{"prompt": [' + b"[1]," * 200_000 + b"[1]]}", 413),
        (b'{"prompt": "a"' + b"".join(b',"f%d": 1' % k for k in range(300_000)) + b"}", 413),
        (b"[" * 300_000, 400),
        (b'{"prompt": "a", "x": ' + b"[" * DEEPEST + b"]" * DEEPEST + b"}", 400),
        (b'{"prompt": "a", "seed": ' + b"1" * 6000 + b"}", 400),
        (b'{"prompt": "a", "seed": NaN}', 400),
        (b'{"prompt": "\xff"}', 400),
        ('{"prompt": "a"}'.encode("utf-16"), 400),
        (b'{"prompt": ' + b"9," * 100, 400),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_parsed(
    client: httpx.Client, text: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(service, "parse_request", lambda kind, body: parsed.append(1))
    answer = client.post("/v1/completions", content=text, headers=JSON)
    assert answer.status_code == status and not parsed
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.text) < 700


def test_of_many_faults_the_first_is_told_and_the_others_are_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from foretell.serve import schemas

    counts: list[int] = []
    told = schemas.of_pydantic

    def of_pydantic(error: Any) -> Any:
        counts.append(error.error_count())
        return told(error)

    monkeypatch.setattr(schemas, "of_pydantic", of_pydantic)
    for body in (
        {"prompt": [["a"]] * 1000},
        {"prompt": [-1] * 1000},
        {"prompt": [[-1] * 1000] * 100},
        {"prompt": "a", **{f"f{k}": k for k in range(1000)}},
    ):
        with pytest.raises(ApiError):
            parse_request(CompletionRequest, body)
    assert len(counts) == 4 and max(counts) < 12


def test_one_value_more_than_allowed_is_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as live, live.client() as client:
        monkeypatch.setattr(live.service, "values", 12)
        assert completion(client, [1] * 9, max_tokens=1)["choices"]
        answer = client.post("/v1/completions", json={"prompt": [1] * 10, "max_tokens": 1})
        assert answer.status_code == 413 and "12 values" in answer.text


def test_a_prompt_of_the_whole_context_is_never_too_many() -> None:
    with running() as live:
        assert live.service.values > live.lm.models["target"].context


@pytest.mark.parametrize("size", [10, 2 * LARGE])
def test_large_bodies_are_read_in_turns_off_the_event_loop(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(kind: Any, body: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse_request(kind, body)

    monkeypatch.setattr(service, "parse_request", noted)
    with running() as live, live.client() as client:
        body = {"prompt": "a", "user": "b" * size, "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert threads[0].startswith("foretell-serve") == (size > LARGE)


def test_a_long_text_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.lm(draft=False)
    text = "漢字" * 100_000
    with running(lm) as live, live.client() as client:
        monkeypatch.setattr(lm._text, "encode", lambda *_: 1 / 0)
        for path, body in (
            ("completions", {"prompt": text}),
            ("completions", {"prompt": ["a" * 9000, "b"]}),
            ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            answer = client.post(f"/v1/{path}", json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
            assert error["param"] in ("prompt", "messages") and "at least" in error["message"]


def test_more_choices_than_allowed_are_refused_before_anything_is_tokenized(
    live: Live, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.lm, "prompt_ids", lambda *_: 1 / 0)
    for body, field in (
        ({"prompt": ["a"] * 200}, "prompt"),
        ({"prompt": ["a", "b"], "n": 128}, "n"),
    ):
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_compressed_bodies_are_refused_by_name(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/completions", content=b"\x1f\x8b", headers=JSON | {"Content-Encoding": "gzip"}
    )
    assert answer.status_code == 415 and "Content-Encoding" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_page_could_send_without_asking_is_no_request(
    client: httpx.Client, kind: str
) -> None:
    answer = client.post(
        "/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind}
    )
    assert answer.status_code == 400 and "application/json" in answer.text


def test_the_description_has_the_bodies(client: httpx.Client) -> None:
    told = client.get("/openapi.json").json()
    for path, name in (("completions", "CompletionRequest"), ("chat/completions", "ChatRequest")):
        content = told["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]
        assert content["application/json"]["schema"]["$ref"].endswith(name)
        assert "properties" in told["components"]["schemas"][name]


def test_both_readers_of_json_say_the_same() -> None:
    with pytest.raises(ApiError, match="it is no JSON: NaN is no number") as refusal:
        parse_json(b"[NaN]", "it", "invalid_line")
    assert refusal.value.code == "invalid_line"
    with pytest.raises(ApiError, match="nested too deeply"):
        parse_json(b"[" * 100_000)
    assert bodies.DEEPEST < 900
