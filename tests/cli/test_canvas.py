"""`foretell generate` with a model that fills canvases: a terminal, a pipe, refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from foretell.api.lm import LM
from foretell.cli._canvas import MASK, Canvas, show_canvas
from foretell.models.diffusion.canvas import Denoiser
from tests import tiny
from tests.diffusion.test_surfaces import lm

SHORT = ["--max-new-tokens", "10", "--ignore-eos", "--method", "threshold:block=5"]


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with such a model."""
    place = tiny.save(tiny.llama(), tmp_path_factory.mktemp("canvas"))
    config = json.loads((place / "config.json").read_text())
    mask = len(tiny.tokenizer()) - 9
    config["canvas"] = {"mask_id": mask, "shift": 0, "block": 0}
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def answer(model: LM) -> Any:
    return model.generate("def", "threshold:block=5", max_new_tokens=10, ignore_eos=True)


def test_a_pipe_gets_the_text(run: Any, filling: str) -> None:
    code, out, err = run("generate", "--model", filling, *SHORT, "def")
    wanted = answer(lm())
    calls, rows = wanted.stats.calls["target"], wanted.stats.rows["target"]
    assert code == 0 and out == wanted.text + "\n"
    assert f"{calls} forwards of {rows} rows" in err and err.count("\n") == 1
    code, out, _ = run("generate", "--model", filling, *SHORT, "--logprobs", "1", "--json", "def")
    assert code == 0 and len(json.loads(out)["logprobs"]) == 10


def test_a_terminal_shows_the_canvas_while_it_fills() -> None:
    canvas = Canvas(Text("def"), lm().decode)
    seen = []
    for piece in lm().stream("def", "threshold:block=5", max_new_tokens=10, ignore_eos=True):
        canvas.take(piece)
        seen.append(canvas.__rich__().plain)
    assert seen[0] == "def" + MASK * 10
    open_ = [text.count(MASK) for text in seen]
    assert open_ == sorted(open_, reverse=True) and open_[-1] == 0 and len({*open_}) > 3
    assert seen[-1] == "def" + answer(lm()).text


def test_what_remains_on_a_terminal_is_the_answer() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=200, height=20)
    pieces = lm().stream("def", "threshold:block=5", max_new_tokens=10, ignore_eos=True)
    last = show_canvas(Text("def"), pieces, lm().decode, console)
    assert last is not None and last.finish_reason == "length"
    shown = file.getvalue()
    assert MASK in shown and MASK not in shown.rpartition("\x1b[?25h")[2]
    assert shown.rpartition("\x1b[?25h")[2].rstrip("\n").endswith(f"def{answer(lm()).text}")


def test_escape_characters_command_nothing() -> None:
    canvas = Canvas(Text(""), lambda tokens: "\x1b[31m")
    canvas.cells = [1, None]
    assert "\x1b" not in canvas.__rich__().plain


def test_it_is_compared_with_one_token_a_forward(run: Any, filling: str) -> None:
    code, out, _ = run("generate", "--model", filling, *SHORT, "--compare", "--json", "def")
    compare = json.loads(out)["compare"]
    assert code == 0 and compare["plain"]["method"] == "confidence"
    assert compare["plain"]["stats"]["calls"] == {"target": 10}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--method", "plain"], "fills canvases"),
        (["--regex", "a+"], "regex"),
        (["--repetition-penalty", "1.3"], "repetition_penalty"),
        (["--guidance", "dola"], "dola"),
        (["--kv", "snapkv"], "snapkv"),
        (["--method", "freedave", "--kv", "window"], "kv=dual"),
        (["--method", "learn2pd"], "names no file"),
        (["--backend", "native"], "backend"),
    ],
)
def test_bad_input_is_one_line(run: Any, filling: str, options: list[str], said: str) -> None:
    code, out, err = run("generate", "--model", filling, "--max-new-tokens", "8", *options, "def")
    assert code == 2 and out.strip() == "" and said in err and err.count("\n") == 1


def test_a_trace_is_for_texts_from_left_to_right(run: Any, filling: str, folder: str) -> None:
    code, _, err = run("trace", "--model", filling, "--max-new-tokens", "8", "def")
    assert code == 2 and "trace" in err and err.count("\n") == 1
    code, _, err = run("generate", "--model", folder, "--method", "threshold", "def")
    assert code == 2 and "fills canvases" in err and err.count("\n") == 1


def test_a_server_is_not_started_with_a_method_of_the_other_kind(
    run: Any, filling: str, folder: str
) -> None:
    for model, method in ((filling, "plain"), (folder, "threshold")):
        code, out, err = run("serve", "--model", model, "--method", method, "--port", "0")
        assert code == 2 and out == "" and "fills canvases" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["audit --method threshold", "tune", "bench"])
def test_commands_for_drafts_say_so(run: Any, filling: str, command: str) -> None:
    code, _, err = run(*command.split(), "--model", filling)
    assert code == 2 and f"foretell {command.split()[0]} cannot run" in err


def test_such_a_model_is_a_denoiser(filling: str) -> None:
    import foretell

    assert isinstance(foretell.load(Path(filling)).models["target"], Denoiser)
