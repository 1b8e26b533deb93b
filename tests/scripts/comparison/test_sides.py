"""Who takes part, and why others do not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from comparison import sides
from comparison.sides import Sides

from foretell.bench import peers
from foretell.bench.peers import Place, Run
from foretell.bench.peers._worker import Worker
from foretell.errors import BadConfig, RequestFailed, Unsupported
from tests import tiny

PLACE = Place("model", None, "int8", "cpu", 2, (0,))
ANSWERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if sys.argv[1] == "bad":
        print(json.dumps({"error": "dtype='int4': must be one of those it has"}), flush=True)
    elif "open" in request:
        told = {"opened": 0.5, "path": "/x", "eos": [0], "executor": "torch", "weights": 7}
        print(json.dumps(told), flush=True)
    else:
        asked = [request.get("method", "a peer"), request["ids"]]
        tokens = [len(asked[0]), *request["ids"]]
        print(json.dumps({"tokens": tokens, "times": [1.0], "counts": [len(tokens)]}), flush=True)
"""


class Script:
    """An environment whose process is the script above."""

    def __init__(self, folder: Path, how: str = "good"):
        (folder / "answers.py").write_text(ANSWERS)
        self.line = [sys.executable, str(folder / "answers.py"), how]

    def command(self, task: str, options: dict[str, Any]) -> list[str]:
        return self.line

    def variables(self) -> dict[str, str]:
        return {}


def test_names_of_formats() -> None:
    assert sides.check_dtypes(["bf16", "int8", "float32"]) == ["bfloat16", "int8", "float32"]
    with pytest.raises(BadConfig, match="--dtypes='int3'"):
        sides.check_dtypes(["int3"])
    assert "ctranslate2" in sides.peers_of("int8")
    assert "ctranslate2" not in sides.peers_of("int4")
    assert "transformers" not in sides.peers_of("bfloat16")
    assert sides.check_dtypes(["file"]) == ["file"] and sides.peers_of("file") == ["llama.cpp"]


def test_a_file_is_compared_in_its_own_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sides.usual_dtypes("gemma3-270m") == sides.usual_dtypes("./x.gguf") == "file"
    assert sides.usual_dtypes("smollm2") == sides.usual_dtypes("a/folder") == "bf16,int8,int4"
    model = tiny.llama(hidden_size=128, intermediate_size=256, head_dim=32)
    file = tiny.gguf(model, tmp_path / "model.gguf", kind="Q4_0")
    assert sides.bits_of("file", str(file)) in (5, 6), "4.5 of its matrices, 32 of the rest"
    monkeypatch.setattr(sides, "Here", lambda: Script(tmp_path))
    with pytest.raises(BadConfig, match=r"--dtypes file: a model is no \.gguf file"):
        sides.open_host("a model", "file", 2)


def test_our_methods_share_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "Here", lambda: Script(tmp_path))
    worker, told = sides.open_host("a model", "int8", 2)
    assert told["path"] == "/x"
    here = Sides()
    sides.add_ours(here, worker, told, "int8", ["plain", "ngram:k=3"])
    plain, ngram = here.contenders
    assert (plain.name, plain.plain, plain.bits) == ("foretell int8 plain", True, 8)
    assert (ngram.name, ngram.plain) == ("foretell int8 ngram:k=3", False)
    assert here.workers == [worker]
    assert ngram.run([4], 8, 0.0, 0) == Run([9, 4], [1.0], [2])
    assert here.opened["foretell int8"]["load_s"] == 0.5
    assert here.opened["foretell int8"]["weight_bytes"] == 7
    if sys.platform == "linux":
        assert here.opened["foretell int8"]["loaded_bytes"] > 0
    here.close()
    assert worker.process is None


def test_a_format_that_does_not_load_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "Here", lambda: Script(tmp_path, "bad"))
    with pytest.raises(RequestFailed, match="foretell int4: dtype='int4': must be one of"):
        sides.open_host("a model", "int4", 2)


def test_peers_that_do_not_open_are_absent_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good: Any = Script(tmp_path)
    bad: Any = Script(tmp_path, "bad")

    def contenders(name: str, place: Place) -> list[Worker]:
        if name == "openvino":
            raise Unsupported("openvino: not installed; set it up")
        return [Worker("one", "as it is", good, {}), Worker("one lookup", "so", bad, {})]

    monkeypatch.setattr(peers, "contenders", contenders)
    here = Sides()
    sides.add_peer(here, "openvino", PLACE)
    sides.add_peer(here, "llama.cpp", PLACE)
    (one,) = here.contenders
    assert (one.name, one.plain, one.bits, one.ours) == ("one", True, 8, False)
    assert one.run([4], 8, 0.0, 0).tokens == [6, 4]
    assert here.absent == {
        "openvino int8": "openvino: not installed; set it up",
        "one lookup": "one lookup: dtype='int4': must be one of those it has",
    }
    here.drop(one, "it fell")
    assert not here.contenders
    assert here.absent["one"] == "it fell"
    one.worker.close()
