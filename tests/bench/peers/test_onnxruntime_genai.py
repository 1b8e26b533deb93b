"""ONNX Runtime GenAI as a peer: what it is called with, and what comes back."""

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

class Config:
    def __init__(self, path):
        self.path = Path(path)

    def overlay(self, text):
        self.text = text

class Model:
    def __init__(self, config):
        self.config = config

class GeneratorParams:
    def __init__(self, model):
        self.told = {"config": json.loads(model.config.text)}
        self.path = model.config.path

    def set_search_options(self, **how):
        self.told["search"] = how

    def set_speculative_options(self, **how):
        self.told["speculative"] = how

class Generator:
    # Counts up from the last token; two tokens a step where it drafts.

    def __init__(self, model, params):
        (params.path / "called.json").write_text(json.dumps(params.told))
        self.room = params.told["search"]["max_length"]
        self.buffered = 0
        self.step = 2 if "speculative" in params.told else 1

    def append_tokens(self, ids):
        assert ids.shape[0] == 1
        self.text = ids[0].tolist()

    def is_done(self):
        return len(self.text) == self.room

    def generate_next_token(self):
        print("what a library prints is no answer")
        self.buffered = (self.buffered or self.step) - 1
        self.text.append(self.text[-1] + 1)

    def get_next_tokens(self):
        return [self.text[-1]]

    def get_speculative_stats(self):
        return {"tokens_buffered": self.buffered}
"""
BUILDER = """
import json, sys
from pathlib import Path
import beside
if __name__ == "__main__":
    out = Path(sys.argv[sys.argv.index("--output") + 1])
    out.mkdir()
    (out / "asked.json").write_text(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    files = {
        "onnxruntime_genai/__init__.py": PACKAGE,
        "onnxruntime_genai/models/builder.py": BUILDER,
        "onnxruntime_genai/models/beside.py": "",
        "onnx_ir.py": "",
    }
    fakes.install(tmp_path, files, monkeypatch)
    return Place(str(tmp_path / "model"), None, "int8", "cpu", 3, (9,))


@pytest.mark.parametrize("dtype", ["int8", "int4", "float32"])
def test_the_two_ways(place: Place, dtype: str, tmp_path: Path) -> None:
    found = peers.contenders("onnxruntime.genai", Place(place.model, None, dtype, "cpu", 3, (9,)))
    name = f"onnxruntime.genai {dtype}"
    assert [peer.name for peer in found] == [name, f"{name} ngram"]
    assert all("intra_op_num_threads=3" in peer.about for peer in found)
    assert not any(str(tmp_path) in peer.about for peer in found), "the report is shown to others"
    (out,) = (tmp_path / "cache" / "peers" / "onnxruntime_genai" / "models").iterdir()
    asked = json.loads((out / "asked.json").read_text())
    assert asked[asked.index("--input") + 1] == place.model
    assert asked[asked.index("--precision") + 1] == dtype.replace("float", "fp")
    assert ("block_size=32" in asked) == ("accuracy_level=4" in asked) == (dtype != "float32")
    for peer, drafts in zip(found, (False, True), strict=True):
        run = peer.run([4, 5], 6, 0.0, 7)
        assert run.tokens == [6, 7, 8, 9], "9 ends a text"
        assert run.counts == ([2, 2] if drafts else [1, 1, 1, 1])
        assert run.times == sorted(run.times)
        called = json.loads((out / "called.json").read_text())
        assert called["search"] == {"max_length": 8, "do_sample": False}
        session = {"intra_op_num_threads": 3}
        assert called["config"] == {"model": {"decoder": {"session_options": session}}}
        assert ("speculative" in called) == drafts
    assert found[1].run([1], 3, 0.5, 8).tokens == [2, 3, 4], "within a step"
    called = json.loads((out / "called.json").read_text())["search"]
    assert (called["do_sample"], called["temperature"], called["random_seed"]) == (True, 0.5, 8)
    fakes.close(found)


def test_what_it_lacks_is_said(place: Place, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"bfloat16.*choose another --dtype"):
        peers.contenders("onnxruntime.genai", Place(place.model, None, "bfloat16", "cpu"))
    (tmp_path / "packages" / "onnxruntime_genai" / "models" / "builder.py").unlink()
    with pytest.raises(Unsupported, match="no model builder"):
        peers.contenders("onnxruntime.genai", place)


def test_the_real_one_decodes_as_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"head_dim": 16}  # it takes no narrower heads
    fakes.same_as_ours("onnxruntime.genai", False, tmp_path, monkeypatch, **wide)
