"""The client of a language server, against a small server that runs as a process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretell.constraints.language_server import Connection, Dead, LanguageServer
from tests.constraints import lsp_server
from tests.constraints.lsp_server import drawn

COMMAND = [sys.executable, "-I", lsp_server.__file__]
URI = "file:///somewhere/text_1.py"
TEXTS = [f"x{i} = y\nx{i}." for i in range(12)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LanguageServer]:
    made = LanguageServer([*COMMAND, str(tmp_path / "log")], tmp_path, 20.0, 3)
    yield made
    made.close()


def test_names_are_those_of_the_text_up_to_its_end(server: LanguageServer) -> None:
    assert any(not drawn(text) for text in TEXTS) and any(map(drawn, TEXTS))
    for text in [*TEXTS, "é🙂 = 1; 🙂.", "a\r\nb."]:
        found, what = server.complete_names(URI, text, ")]")
        assert found == set(drawn(text)), "keywords and what is no name are left out"
        assert what == ("answered" if found else "empty")
    assert server.counts["answered"] + server.counts["empty"] == len(TEXTS) + 2


def test_a_text_is_a_document_whose_versions_rise(server: LanguageServer, tmp_path: Path) -> None:
    other = URI.replace("_1", "_2")
    for uri, text in [(URI, "a."), (other, "b."), (URI, "c."), (other, "d."), (URI, "e.")]:
        assert server.complete_names(uri, text)[0] == set(drawn(text))
    server.unused.append(URI)
    server.complete_names(other, "f.")
    lines = (tmp_path / "log").read_text().splitlines()
    told = [json.loads(line) for line in lines if "warming_up" not in line]
    assert [(method.rpartition("did")[2], name[5], version) for method, name, version in told] == [
        ("Open", "1", 1), ("Open", "2", 1), ("Change", "1", 2), ("Change", "2", 2),
        ("Change", "1", 3), ("Close", "1", None), ("Change", "2", 3),
    ]  # fmt: skip


def test_a_late_answer_is_left_aside(tmp_path: Path) -> None:
    server = LanguageServer(COMMAND, tmp_path, 20.0, 3)
    try:
        server.complete_names(URI, "a.")
        server.limit = 0.05
        assert server.complete_names(URI, "late a.") == (set(), "late")
        server.limit = 20.0
        assert server.complete_names(URI, TEXTS[1])[0] == set(drawn(TEXTS[1])), "not the late one's"
        assert server.late == 0 and not server.counts["restarts"]
    finally:
        server.close()


def test_one_that_is_always_late_is_dead(tmp_path: Path) -> None:
    server = LanguageServer(COMMAND, tmp_path, 20.0, 0)
    server.complete_names(URI, "a.")
    server.limit = 0.02
    for _ in range(2):
        assert server.complete_names(URI, "late.")[1] == "late"
    with pytest.warns(UserWarning, match="was given up .3 answers in a row were late"):
        assert server.complete_names(URI, "late.") == (set(), "late")
    assert server.connection is None and server.complete_names(URI, "a.") == (set(), "unasked")


@pytest.mark.parametrize("word", ["die", "garbage", "list", "huge", "odd"])
def test_a_dead_one_is_started_three_times_and_then_given_up(tmp_path: Path, word: str) -> None:
    server = LanguageServer(COMMAND, tmp_path, 20.0, 3)
    assert server.complete_names(URI, "a.")[0] == set(drawn("a."))
    first = server.connection
    assert first is not None
    with pytest.warns(UserWarning, match="names are free from here on") as told:
        assert server.complete_names(URI, f"{word} b.") == (set(), "unasked")
    assert len(told) == 1 and server.counts["restarts"] == 3
    assert first.process.poll() is not None, "it is left running"
    assert server.complete_names(URI, "a.") == (set(), "unasked"), "and it is said once"


def test_after_a_death_it_goes_on(tmp_path: Path) -> None:
    """By the third restart; documents are opened again."""
    server = LanguageServer(COMMAND, tmp_path, 20.0, 3)
    try:
        for round_ in range(3):
            assert server.connection is None or not round_ or server.connection.versions
            assert server.complete_names(URI, TEXTS[round_])[0] == set(drawn(TEXTS[round_]))
            assert server.connection is not None
            server.connection.process.kill()
            server.connection.process.wait()
        assert server.complete_names(URI, TEXTS[3])[0] == set(drawn(TEXTS[3]))
        assert server.counts["restarts"] == 3 and not server.given_up
    finally:
        server.close()


def test_what_a_server_refuses_is_no_death(server: LanguageServer) -> None:
    assert server.complete_names(URI, "refuse a.") == (set(), "failed")
    assert server.complete_names(URI, "a.")[0] == set(drawn("a.")) and not server.counts["restarts"]


def test_a_command_that_does_not_run_is_given_up(tmp_path: Path) -> None:
    server = LanguageServer([str(tmp_path / "nothing")], tmp_path, 1.0, 1)
    with pytest.warns(UserWarning, match="No such file"):
        assert server.complete_names(URI, "a.") == (set(), "unasked")


def test_a_server_that_reads_nothing_is_dead(tmp_path: Path) -> None:
    """A text that does not fit into its pipe."""
    sleeping = [sys.executable, "-I", "-c", "import time; time.sleep(60)"]
    stuck = Connection(sleeping, tmp_path)
    with pytest.raises(Dead, match="reads nothing"):
        stuck.show_document(URI, "x" * 2**20, 0.05)
    stuck.close()
    assert stuck.process.poll() is not None
