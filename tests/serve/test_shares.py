"""What one request or one client may take: texts side by side, and methods that it names."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
import pytest

from foretell.engine import messages
from foretell.errors import RequestFailed
from foretell.serve.learnt import CONFIGS
from foretell.serve.settings import Settings
from tests import tiny
from tests.serve.asked import TEXT
from tests.serve.live import Live, running
from tests.serve.test_guard import OTHER, SECRET, bearer, keys

SPECS = (
    "a-star:frontier=3,k=2,reward=length",
    "awrs:n=3,threshold=1",
    "beam:width=3",
    "best-of:n=3",
    "best-of:n=2,references=3",
    "conditional-beam:width=3,least=2",
    "diverse-beam:width=4,groups=2",
    "first-finish:n=3",
    "pg-td:rollouts=4,reward=length",
    "superposed:k=3,reset=2",
)


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "best-of:n=256", "n": 32},
        {"method": "best-of:n=5", "n": 32},
        {"method": "best-of:n=100,references=100"},
        {"method": "first-finish:n=129"},
        {"method": "beam:width=64", "prompt": ["a", "b"], "temperature": 0},
        {"method": "awrs:n=64", "n": 3},
        {"method": "best-of:n=2", "prompt": ["a"] * 70, "stream": True},
    ],
)
def test_texts_side_by_side_count_before_any_is_begun(
    live: Live, client: httpx.Client, fields: dict[str, Any]
) -> None:
    before = live.lm.engine.status()["requests"]
    answer = client.post("/v1/completions", json={"prompt": TEXT, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "method" and "128" in error["message"]
    assert live.lm.engine.status()["requests"] == before


def test_texts_side_by_side_take_places_of_those_who_wait(
    client: httpx.Client, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    admitted = live.service.gate.admit_answers

    def noted(key: Any, answers: int, tokens: int) -> Any:
        taken.append(answers)
        return admitted(key, answers, tokens)

    monkeypatch.setattr(live.service.gate, "admit_answers", noted)
    body = {"prompt": "a", "method": "best-of:n=5", "n": 3, "max_tokens": 2}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert taken == [15]


@pytest.mark.parametrize("spec", SPECS)
def test_no_method_has_more_texts_than_it_says(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.lm(draft=False)
    strategy = lm.resolve(spec)[1]
    most = [1]
    for kind in (messages.Fork, messages.Open):
        handler = messages.HANDLERS[kind]

        def noted(engine: Any, live: Any, task: Any, message: Any, do: Any = handler) -> None:
            do(engine, live, task, message)
            most.append(len(live.ctx.branches))

        monkeypatch.setitem(messages.HANDLERS, kind, noted)
    drawn = getattr(strategy, "draws", True)
    with contextlib.suppress(RequestFailed):  # where no text is what it ought to be
        form = {"regex": "[a-z ]{1,20}"} if spec.startswith("awrs") else {}
        lm.generate(TEXT, spec, max_new_tokens=6, temperature=float(drawn), **form)
    assert max(most) <= max(2, strategy.most_texts) and len(most) > 1


def test_a_method_that_cannot_tell_is_stopped_where_it_has_too_many() -> None:
    with running() as live, live.client() as client:
        live.lm.engine.admission.branches = 3
        body = {"prompt": TEXT, "method": "best-of:n=4", "max_tokens": 2}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 400 and "at most 3 texts" in answer.json()["error"]["message"]
        body["method"] = "best-of:n=3"
        assert client.post("/v1/completions", json=body).status_code == 200


def test_one_key_cannot_take_the_methods_of_another() -> None:
    settings = Settings(keys=keys())
    with running(settings=settings) as live, live.client() as client:

        def ask(key: str, method: str) -> int:
            body = {"prompt": "a b a b", "max_tokens": 1, "method": method}
            return client.post("/v1/completions", json=body, headers=bearer(key)).status_code

        assert ask(OTHER, "suffix:shared=yes") == 200
        for k in range(2, CONFIGS + 12):
            assert ask(SECRET, f"suffix:shared=yes,megabytes={k}") == 200
        assert ask(OTHER, "suffix:shared=yes,megabytes=9") == 200
        kept = [tenant for tenant, _ in live.lm.engine.stores.used]
        assert kept.count("one") == CONFIGS and kept.count("two") == 2
