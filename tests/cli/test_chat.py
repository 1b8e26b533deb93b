"""`foretell chat`: questions from a pipe, and on a terminal of its own."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedModel

import foretell
from foretell.api.outputs import Piece
from foretell.cli import chat as module
from foretell.cli._answers import colour_piece
from foretell.cli.chat import COMMANDS
from tests import tiny

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SHORT = ["--max-new-tokens", "12", "--method", "plain"]
SECONDS = 60.0  # until something that should appear is given up


def llama() -> PreTrainedModel:
    """It differs from other tests' models in its layers, too, on which kept costs depend."""
    return tiny.llama(num_hidden_layers=1, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save(llama(), tmp_path_factory.mktemp("chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return folder


@pytest.fixture
def piped(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a chat with these lines on standard input."""

    def call(*lines: str, options: list[str] = SHORT) -> tuple[int, str, str]:
        data = "".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        result: tuple[int, str, str] = run("chat", "--model", str(model), *options)
        return result

    return call


@pytest.fixture(scope="module")
def lm() -> foretell.LM:
    return foretell.wrap(llama(), tiny.tokenizer(), name="tiny")


def answer(lm: foretell.LM, text: str, **more: Any) -> str:
    return str(lm.generate(text, "plain", max_new_tokens=12, **more).text)


def test_each_line_is_a_question_and_each_answer_a_line(piped: Any, lm: foretell.LM) -> None:
    long = "What about the quick brown fox that jumps over the lazy dog, and the dog? " * 3
    first = answer(lm, f"user: {long}\n")
    second = answer(lm, f"user: {long}\nassistant: {first}\nuser: Two\n and more?\n")
    code, out, err = piped(long, "", "Two\\", " and more?", "/stats")
    assert (code, out) == (0, f"{first}\n{second}\n")
    cut_off = "cut off at --max-new-tokens, or where the model's context ends"
    assert err.splitlines()[:2] == [cut_off, cut_off]
    known = re.search(r"; (\d+) of \d+ tokens of questions and what was before", err)
    assert known and int(known[1]) > 0, "the second question comes after rows that are there"


def test_commands_change_what_follows(piped: Any, lm: foretell.LM, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = ["/temperature 1", "/seed 3", "/system Be brief.", "One?", "/retry", "/stats"]
    code, out, err = piped(*lines, f"/save {file}", "Two?", "/undo", "/quit", "Never?")
    told = "system: Be brief.\nuser: One?\n"
    answers = [answer(lm, told, temperature=1.0, seed=seed) for seed in (3, 4)]
    assert code == 0 and out.startswith(f"{answers[0]}\n{answers[1]}\n")
    assert "forgotten: Two?" in err and "Never?" not in err
    assert "plain: 12 tokens, " in err and "conversation: 1 turns" in err
    assert json.loads(file.read_text())["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": answers[1]},
    ]
    next_text = f"{told}assistant: {answers[1]}\nuser: //help\n"
    code, out, _ = piped(f"/load {file}", "///help")
    assert (code, out) == (0, answer(lm, next_text) + "\n")
    code, out, _ = piped(f"/load {file}", "/clear", "/system", "One?")
    assert (code, out) == (0, answer(lm, "user: One?\n") + "\n")


def test_every_command_is_listed(piped: Any) -> None:
    code, out, err = piped("/help")
    assert (code, out) == (0, "") and all(name in err for name in COMMANDS)


MISTAKES = {
    "/temprature 1": "did you mean /temperature",
    "/temperature hot": "write a number",
    "/temperature -1": "temperature=-1.0: must be",
    "/seed 0.5": "write a number",
    "/method nothing": "unknown method",
    "/method draft": "'draft' model",
    "/stats all": "takes nothing after it",
    "/undo": "ask something first",
    "/retry": "ask something first",
    "/save": "name a file",
    "/load ./none": "none: No such file",
    "/load {model}": "Is a directory",
    "/load {model}/config.json": "no saved chat",
    "/load {model}/chat_template.jinja": "no JSON text",
    "/save {model}/config.json": "no saved chat; name another file",
    "/save {model}": "a folder; name a file",
    "word " * 4000: "shorten it",
}


def test_a_mistake_is_one_line_and_the_chat_goes_on(
    piped: Any, model: Path, lm: foretell.LM
) -> None:
    lines = [line.format(model=model) for line in MISTAKES]
    code, out, err = piped(*lines, "One?")
    assert (code, out) == (2, answer(lm, "user: One?\n") + "\n")
    *errors, _ = err.splitlines()
    assert len(errors) == len(MISTAKES)
    for error, said in zip(errors, MISTAKES.values(), strict=True):
        assert error.startswith("error: ") and said in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--n", "2"], "leave --n out"),
        (["--logprobs", "1"], "leave --logprobs out"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--logit-bias", "99999=1"], "99999"),
        (["--method", "nothing"], "unknown method"),
    ],
)
def test_a_wrong_option_ends_before_the_first_question(
    piped: Any, options: list[str], said: str
) -> None:
    code, out, err = piped("One?", options=[*SHORT, *options])
    assert (code, out) == (2, "") and err.startswith("error: ") and said in err
    assert err.count("\n") == 1


def test_a_model_without_a_chat_template_says_so(piped: Any, folder: str) -> None:
    code, out, err = piped("One?", options=["--model", folder, *SHORT])
    assert (code, out) == (2, "") and "chat template" in err and err.count("\n") == 1


def test_what_is_no_text_is_named(piped: Any) -> None:
    code, _, err = piped("caf\udce9")
    assert code == 2 and err == (
        "error: standard input: not UTF-8 text (byte 0xe9); "
        "convert it, for example with iconv -t UTF-8\n"
    )


def test_an_interrupted_pipe_ends(piped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("foretell.cli._conversation.Chat.ask", interrupted)
    assert piped("One?", "Two?") == (130, "", "interrupted\n")


def test_colours_are_for_terminals_that_want_them(
    piped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-new-tokens", "400", "--method", "ngram:nodes=4"]
    for no_color in (False, True):

        def terminal(no_color: bool = no_color, **options: Any) -> Console:
            return Console(
                force_terminal=True, color_system="standard", no_color=no_color, **options
            )

        monkeypatch.setattr(module, "Console", terminal)
        code, out, err = piped("One? One? One? One?", options=options)
        assert code == 0
        assert ("\x1b[32m" in out) is not no_color
        assert ("drafted by ngram" in err) is not no_color


def test_a_model_cannot_command_the_terminal() -> None:
    piece = Piece("a\x1b[2Jb\x9b1mc", [1, 2], ["target", "ngram"], parts=["a\x1b[2J", "b"])
    text = colour_piece(piece, {})
    assert text.plain == "a\u241b[2Jb\u241b1mc"
    assert [span.style for span in text.spans] == ["green"]


# --- on a terminal


class Terminal:
    """A chat whose standard streams are a terminal."""

    def __init__(self, *arguments: str, **environment: str):
        self.screen, streams = pty.openpty()
        self.shown = ""  # what was written since the last `until`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "foretell", "chat", *arguments],
            stdin=streams,
            stdout=streams,
            stderr=streams,
            env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),  # so that Ctrl-C arrives
        )
        os.close(streams)

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def until(self, pattern: str) -> str:
        """What is shown until the pattern is found, with it."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.shown)):
            ready, _, _ = select.select([self.screen], [], [], deadline - time.monotonic())
            assert ready, f"{pattern!r} is not in {self.shown!r}"
            self.shown += os.read(self.screen, 65536).decode("utf-8", "replace")
        shown, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.screen)


def test_a_conversation_on_a_terminal(model: Path, tmp_path: Path) -> None:
    options = ["--model", str(model), "--method", "ngram:nodes=4", "--ignore-eos"]
    terminal = Terminal(*options, "--max-new-tokens", "4000", FORETELL_CACHE=str(tmp_path))
    try:
        terminal.until("method ngram:nodes=4; /help lists commands, Ctrl-D ends\r\n.*> ")
        terminal.type("/he\t\n")  # completed
        terminal.until("/quit +end, as Ctrl-D does")
        terminal.until("> ")
        terminal.type("One?\\\nTwo?\n")
        terminal.until(r"\x1b\[32m")  # a drafted token
        terminal.type("\x03")
        terminal.until("interrupted; what was said is kept\r\n")
        terminal.until("> ")
        terminal.type("/stats\n")
        terminal.until("conversation: 1 turns, 1 of them interrupted, 0 left out; ")
        terminal.until("> ")
        terminal.type("/nothing\n")
        terminal.until("error: unknown command '/nothing'; did you mean")
        terminal.until("> ")
        terminal.type("\x1b[A\x1b[A\n")  # the line before the last one
        terminal.until("conversation: 1 turns")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()
    history = tmp_path / "chat_history"
    assert history.read_text().splitlines()[-3:] == ["/stats", "/nothing", "/stats"]
    assert history.stat().st_mode & 0o077 == 0
