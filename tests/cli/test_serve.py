"""`foretell serve`: what it refuses before anything is loaded, and what it says when it listens."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import run
from foretell.cli import serve as module
from foretell.serve.lifecycle import Server
from tests import tiny

KEY = "sk-0123456789abcdef"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{KEY} name=one\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Loads the tiny model, and keeps what would have been served and where."""
    found: list[Any] = []

    def keep(self: Server, sockets: list[socket.socket]) -> None:
        found.append((self, sockets[0].getsockname()))

    monkeypatch.setattr(Server, "run", keep)
    monkeypatch.setattr(module, "load_model", lambda *_: tiny.lm(draft=False))
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that must be refused."""
    assert run(["serve", "--model", "none", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_it_says_where_it_listens_and_what_holds(
    served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--model", "demo", "--port", "0"]) == 0
    server, (host, port) = served[0]
    said = capsys.readouterr().err
    assert host == "127.0.0.1" and f"demo at http://127.0.0.1:{port}/v1" in said
    assert "its answers are exact" in said and "programs of this machine may ask" in said
    settings = server.config.app.state.service.settings
    assert settings.hosts == ("localhost", "127.0.0.1", "::1", "127.0.0.1")
    assert settings.origins == () and not settings.keys and not settings.log_prompts


def test_its_options_become_settings(
    served: list[Any], keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "tests.jsonl"
    tests.write_text('{"tests": ["assert f() == 1"]}', "utf-8")
    options = {
        "--api-key-file": str(keys), "--host": "0.0.0.0", "--port": "0", "--method": "ngram:n=2",
        "--name": "mine", "--max-requests": "5", "--max-waiting": "6", "--memory": "0.5",
        "--prefix-memory": "0", "--between-tokens": "50", "--max-prompt-tokens": "70",
        "--max-tokens": "80", "--max-body": "0.5", "--timeout": "9", "--patience": "3",
        "--drain-seconds": "2", "--cors": "https://a.example", "--allow-host": "Me.example",
        "--budget": "3", "--monitor": ".", "--allow-tests": str(tests),
    }  # fmt: skip
    flags = ["--share-between-keys", "--log-prompts"]
    assert run(["serve", "--model", "demo", *sum(options.items(), ()), *flags]) == 0
    server, _ = served[0]
    service = server.config.app.state.service
    settings = service.settings
    assert [key.name for key in settings.keys.keys] == ["one"]
    bounds = settings.bounds
    assert (bounds.method, bounds.prompt_tokens) == ("ngram:n=2", 70)
    assert (bounds.answer_tokens, bounds.timeout, bounds.tests) == (80, 9, str(tests))
    assert bounds.monitor == str(Path().resolve())
    assert (settings.running, settings.waiting, settings.memory) == (5, 6, 2**29)
    assert (settings.prefixes, settings.between_tokens, settings.body) == (0, 0.05, 2**19)
    assert (settings.patience, settings.drain, server.drain) == (3, 2, 2)
    assert settings.origins == ("https://a.example",) and settings.hosts == ("me.example",)
    assert settings.share_between_keys and settings.log_prompts
    engine = service.lm.engine
    assert (engine.admission.requests, engine.admission.memory) == (5, 2**29)
    assert engine.admission.budget == settings.budget == 3 * 2**30
    assert "mine at http://0.0.0.0:" in capsys.readouterr().err


def test_a_file_without_tests_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "--port", "0", "--allow-tests", str(tmp_path / "none"))
    assert "cannot be read as tests" in said


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        said = refusal(capsys, "--port", port)
    assert f"port {port}" in said and "--port" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_others_are_let_in_by_keys_or_by_word(
    capsys: pytest.CaptureFixture[str], host: str
) -> None:
    said = refusal(capsys, "--host", host)
    assert "--api-key-file" in said and "--insecure" in said


def test_anybody_may_ask_where_that_is_meant(
    served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--model", "demo", "--host", "0.0.0.0", "--port", "0", "--insecure"]) == 0
    assert "anybody may ask" in capsys.readouterr().err
    assert served[0][0].config.app.state.service.settings.hosts == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "no such host"], "--host no such host"),
        (["--method", "sufix"], "unknown method 'sufix'"),
        (["--api-key-file", "none"], "none: No such file"),
        (["--monitor", "none"], "--monitor none: there is no such folder"),
        (["--memory", "0"], "--memory 0: must be above 0"),
        (["--budget", "-2"], "--budget -2: must be above 0"),
        (["--timeout", "nan"], "--timeout nan: must be above 0"),
        (["--max-body", "-1"], "--max-body -1: must be above 0"),
        (["--port", "70000"], "--port"),
        (["--max-requests", "0"], "--max-requests"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in refusal(
        capsys, *arguments, *([] if "--host" not in arguments else ["--insecure"])
    )


def test_a_file_of_keys_that_others_can_read(
    served: list[Any], keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys.chmod(0o644)
    assert run(["serve", "--model", "demo", "--port", "0", "--api-key-file", str(keys)]) == 0
    assert f"chmod 600 {keys}" in capsys.readouterr().err


def test_without_its_libraries_it_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(
        "foretell.serve.find_spec", lambda name: None if name == "uvicorn" else original(name)
    )
    assert "pip install 'foretell[serve]'" in refusal(capsys)
