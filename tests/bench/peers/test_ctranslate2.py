"""CTranslate2 as a peer: what it is called with, and what comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.bench import peers
from foretell.bench.peers import Place
from foretell.errors import Unsupported
from tests.bench.peers import fakes

PACKAGE = """
import json
from pathlib import Path

def set_random_seed(seed):
    CALLED["seed"] = seed

CALLED = {}

class Step:
    def __init__(self, token_id):
        self.token_id = token_id

class Generator:
    def __init__(self, path, **how):
        self.path = Path(path)
        CALLED["opened"] = how

    def generate_batch(self, prompts, max_length, end_token, callback, **how):
        print("what a library prints is no answer")
        given = {"prompts": prompts, "max_length": max_length, "end_token": end_token}
        CALLED["called"] = how | given
        (self.path / "called.json").write_text(json.dumps(CALLED))
        for token in range(int(prompts[0][-1]) + 1, 10)[:max_length]:
            if callback(Step(token)) or token in (end_token or []):
                return
"""
CONVERTERS = """
import json
from pathlib import Path

class TransformersConverter:
    def __init__(self, source):
        self.source = source

    def convert(self, out, quantization):
        Path(out).mkdir()
        (Path(out) / "vocabulary.json").write_text(json.dumps([str(i) for i in range(10)]))
        (Path(out) / "asked.json").write_text(json.dumps([self.source, quantization]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    files = {"ctranslate2/__init__.py": PACKAGE, "ctranslate2/converters.py": CONVERTERS}
    fakes.install(tmp_path, files, monkeypatch)
    return Place(str(tmp_path / "model"), None, "bfloat16", "cpu", 3, (8,))


def test_it_is_called_as_its_documentation_says(place: Place, tmp_path: Path) -> None:
    found = peers.contenders("ctranslate2", place)
    assert [peer.name for peer in found] == ["ctranslate2 float32"], (
        "it has no 16 bits on a CPU, and says so"
    )
    assert "compute_type=float32" in found[0].about
    assert "intra_threads=3" in found[0].about
    run = found[0].run([1, 5], 6, 0.0, 7)
    assert (
        run.tokens == [6, 7, 8] and run.counts == [1, 1, 1] and 0 < run.times[0] <= run.times[2]
    ), "8 ends a text"
    (out,) = (tmp_path / "cache" / "peers" / "ctranslate2" / "models").iterdir()
    assert json.loads((out / "asked.json").read_text()) == [str(tmp_path / "model"), "float32"]
    called = json.loads((out / "called.json").read_text())
    assert called["opened"] == {"compute_type": "float32", "inter_threads": 1, "intra_threads": 3}
    assert called["called"] == {
        "prompts": [["1", "5"]],
        "max_length": 6,
        "end_token": [8],
        "include_prompt_in_result": False,
        "sampling_topk": 1,
    }
    assert found[0].run([1], 2, 0.5, 9).tokens == [2, 3]
    called = json.loads((out / "called.json").read_text())
    assert called["seed"] == 9
    assert called["called"]["sampling_topk"] == 0
    assert called["called"]["sampling_temperature"] == 0.5
    fakes.close(found)


def test_eight_bits_and_formats_that_it_lacks(place: Place) -> None:
    (peer,) = peers.contenders("ctranslate2", Place(place.model, None, "int8", "cpu"))
    assert peer.name == "ctranslate2 int8"
    with pytest.raises(Unsupported, match=r"float64.*choose another --dtype"):
        peers.contenders("ctranslate2", Place(place.model, None, "float64", "cpu"))


def test_the_real_one_decodes_as_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.same_as_ours("ctranslate2", False, tmp_path, monkeypatch)
