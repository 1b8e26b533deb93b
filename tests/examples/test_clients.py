"""The examples, against a server with a tiny model. FORETELL_CLIENTS is the Python that has their
packages (`make test-clients` makes one); where it lacks one, its example is skipped.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from tests import tiny

pytest.importorskip("fastapi", reason="the server's packages are not installed")

from tests.serve.live import NAME, Live, running

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# By its whole name: one example leaves the folder it was started in.
PYTHON = os.path.abspath(os.environ.get("FORETELL_CLIENTS", sys.executable))
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SECONDS = 240


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    hf = tiny.llama(num_hidden_layers=1, max_position_embeddings=4096)
    with running(foretell.wrap(hf, tokenizer, name="tiny")) as live:
        yield live


def needs(*packages: str) -> None:
    """Skips the test where the clients' Python lacks one of them."""
    code = (
        "import sys, importlib.util as u; "
        "print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
    )
    done = subprocess.run([PYTHON, "-c", code, *packages], capture_output=True, text=True)
    if missing := done.stdout.strip():
        pytest.skip(f"{missing} is not installed; `make test-clients` installs it")


def output(server: Live, *command: str, **environment: str) -> str:
    """What an example prints."""
    url = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"}
    quiet = {"PYTHONIOENCODING": "utf-8", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        env={**os.environ, **url, **quiet, **environment},
        capture_output=True,
        timeout=SECONDS,
    )
    assert not done.returncode, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode()


def answer(server: Live, prompt: Any, tokens: int) -> str:
    """Of plain decoding."""
    ids = server.lm.prompt_ids(prompt)
    return str(server.lm.generate(ids, "plain", max_new_tokens=tokens).text)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_curl(server: Live) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    out = output(server, "sh", str(EXAMPLES / "curl.sh"))
    whole = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    models, first, chat, ngram, plain = whole
    assert models["data"][0]["id"] == NAME
    text = first["choices"][0]["text"]
    assert text == answer(server, "The capital of France is", 12)
    question = user("What is the capital of France?")
    asked = [{"role": "system", "content": "Answer in one sentence."}, question]
    assert chat["choices"][0]["message"]["content"] == answer(server, asked, 32)
    assert ngram["choices"][0]["text"] == plain["choices"][0]["text"]
    assert (ngram["foretell"]["method"], plain["foretell"]["method"]) == ("ngram", "plain")
    events = [line.removeprefix("data: ") for line in out.splitlines() if line.startswith("data")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    pieces = [choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]]
    assert "".join(pieces) == answer(server, [user("Count to ten.")], 48)
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_curl_without_a_server_fails_in_one_line(server: Live) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    done = subprocess.run(
        ["sh", str(EXAMPLES / "curl.sh")],
        env={**os.environ, "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode and done.stderr.splitlines()[1].startswith("curl: ")


def test_openai_s_client(server: Live) -> None:
    needs("openai")
    out = output(server, PYTHON, str(EXAMPLES / "openai_client.py"))
    text = answer(server, [user("What is the capital of France?")], 32)
    assert out.startswith(f"chat: {text}\ntokens: ")
    assert f"\nstream: {text}\nusage: " in out
    assert "'guarantee': 'exact'" in out
    assert len(re.findall(r"^logprobs: .* of .*, .*$", out, re.M)) == 4
    assert "\nstructured: " in out and "cut off" not in out
    assert "\nsamples: 3 the same again: True\n" in out
    assert "\nmistake: temperature: " in out


def test_langchain(server: Live) -> None:
    needs("langchain_openai")
    out = output(server, PYTHON, str(EXAMPLES / "langchain_stream.py"), MODEL=NAME)
    asked = [
        {"role": "system", "content": "Answer in one sentence."},
        user("Tell me something about the sea."),
    ]
    text = answer(server, asked, 48)
    assert out.startswith(f"stream: {text}\npieces: ")
    pieces = re.search(r"\npieces: (\d+)\n", out)
    assert pieces and int(pieces[1]) > 2
    assert f"\nthe sea: {text}\na mountain: " in out and "\na river: " in out


def test_the_examples_say_where_no_server_is() -> None:
    needs("openai")
    done = subprocess.run(
        [PYTHON, str(EXAMPLES / "openai_client.py")],
        env={**os.environ, "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: no server at http://127.0.0.1:1/v1: start one with foretell serve\n"
    )


def test_the_harness(server: Live, tmp_path: Path) -> None:
    needs("lm_eval", "transformers", "datasets")
    tiny.tokenizer().save_pretrained(tmp_path)
    out = output(
        server,
        "sh",
        str(EXAMPLES / "lm_eval.sh"),
        str(tmp_path),
        NAME,
        LM_EVAL=f"{PYTHON} -m lm_eval",
        HF_DATASETS_CACHE=str(tmp_path / "datasets"),
    )
    found = re.search(r"\|capitals_choice\|.*\|acc +\|↑ +\| *([\d.]+)\|", out)
    assert found and float(found[1]) == pytest.approx(share_of_right_choices(), abs=1e-3)
    assert re.search(r"\|capitals_text *\|.*\|exact_match\|", out)


def share_of_right_choices() -> float:
    """What the harness should find: of each question the choice with the likeliest tokens."""
    model = tiny.llama(num_hidden_layers=1, max_position_embeddings=4096)
    right = []
    for line in (EXAMPLES / "lm_eval" / "capitals.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        begins = f"The capital of {row['country']} is"
        count = len(tiny.tokenizer()(begins)["input_ids"])
        scores = []
        for city in row["cities"]:
            ids = torch.tensor(tiny.tokenizer()(f"{begins} {city}")["input_ids"])
            with torch.inference_mode():
                laws = model(ids[None]).logits[0].log_softmax(-1)
            rows = range(count - 1, len(ids) - 1)
            scores.append(sum(float(laws[i, ids[i + 1]]) for i in rows))
        right.append(max(range(len(scores)), key=scores.__getitem__) == row["answer"])
    return sum(right) / len(right)
