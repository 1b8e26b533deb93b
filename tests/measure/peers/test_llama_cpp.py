"""llama.cpp as a peer: what it is called with, what comes back, and how its converter is run."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import Unsupported
from foretell.measure import peers
from foretell.measure.peers import Place, llama_cpp
from foretell.measure.peers._environment import home, pins
from tests.measure.peers import fakes

PACKAGE = '''
import json

class Llama:
    """Counts up from the last token; with a draft model, two tokens a forward."""

    def __init__(self, file, n_ctx, draft_model, **how):
        self.file = file
        self.size = n_ctx
        self.draft = draft_model
        self.how = how
        self.resets = 0
        self.seeds = []

    def n_ctx(self):
        return self.size

    def reset(self):
        self.resets += 1

    def set_seed(self, seed):
        self.seeds.append(seed)

    def eval(self, tokens):
        print("what a library prints is no answer")

    def generate(self, ids, **how):
        told = {
            "how": self.how,
            "n_ctx": self.size,
            "draft": self.draft and self.draft.number,
            "resets": self.resets,
            "seeds": self.seeds,
            "sampling": how,
        }
        with open(self.file + ".json", "w") as out:
            json.dump(told, out)
        token = ids[-1]
        while True:
            self.eval([token])
            for _ in range(2 if self.draft else 1):
                token += 1
                yield token
'''
LOOKUP = """
class LlamaPromptLookupDecoding:
    def __init__(self, num_pred_tokens):
        self.number = num_pred_tokens
"""
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer is None:
            raise NotImplementedError("BPE pre-tokenizer was not recognized")
        return "known"
"""
CONVERTER = """
import json, sys
from conversion.base import TextModel
import gguf
cut = [TextModel().get_vocab_base_pre(t) for t in (None, "a tokenizer")]
if __name__ == "__main__":
    source, _, out, _, kind = sys.argv[1:]
    open(out, "w").write(json.dumps([source, kind, cut]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    files = {"llama_cpp/__init__.py": PACKAGE, "llama_cpp/llama_speculative.py": LOOKUP}
    fakes.install(tmp_path, files, monkeypatch)
    return Place(str(tmp_path / "model"), None, "bfloat16", "cpu", 3, (9,))


@pytest.fixture
def sources(place: Place) -> None:
    files = {"convert_hf_to_gguf.py": CONVERTER, "conversion/base.py": BASE, "gguf-py/gguf.py": ""}
    for name, text in files.items():
        path = home("llama.cpp") / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "BF16"), ("int8", "Q8_0")])
def test_the_three_ways(place: Place, dtype: str, kind: str) -> None:
    found = peers.contenders("llama.cpp", Place(place.model, None, dtype, "cpu", 3, (9,)))
    name = f"llama.cpp {kind}"
    assert [peer.name for peer in found] == [
        name,
        f"{name} prompt lookup 2",
        f"{name} prompt lookup 10",
    ]
    assert all(kind in peer.about and "n_threads=n_threads_batch=3" in peer.about for peer in found)
    (file,) = (home("llama.cpp") / "models").iterdir()
    assert json.loads(file.read_text()) == [place.model, kind.lower(), ["gpt-2", "known"]]
    told: dict[str, Any] = {}
    for peer, lookup in zip(found, (None, 2, 10), strict=True):
        run = peer.run([4, 5], 6, 0.0, 7)
        assert run.tokens == [6, 7, 8, 9], "9 ends a text"
        assert run.counts == ([2, 2] if lookup else [1, 1, 1, 1])
        assert run.times == sorted(run.times)
        told = json.loads(Path(f"{file}.json").read_text())
        assert told["how"] == {
            "n_threads": 3,
            "n_threads_batch": 3,
            "verbose": False,
            "logits_all": lookup is not None,
        }
        assert (told["draft"], told["resets"], told["seeds"], told["n_ctx"]) == (
            lookup,
            1,
            [7],
            2048,
        )
        assert told["sampling"] == {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 0.0}
    assert found[2].run([1], 3, 0.5, 8).tokens == [2, 3, 4], "within a step"
    told = json.loads(Path(f"{file}.json").read_text())
    assert told["sampling"]["temp"] == 0.5
    assert told["resets"] == 2
    assert told["seeds"] == [7, 8]
    assert len(found[0].run([10] * 3000, 50, 0.0, 0).tokens) == 50
    assert json.loads(Path(f"{file}.json").read_text())["n_ctx"] > 3050, (
        "a prompt that is too long opens it again"
    )
    fakes.close(found)


def test_a_gguf_file_is_taken_as_it_is(place: Place, tmp_path: Path) -> None:
    found = peers.contenders(
        "llama.cpp", Place(str(tmp_path / "some.gguf"), None, "bfloat16", "cpu")
    )
    assert found[0].name == "llama.cpp"
    assert "as it is" in found[0].about
    assert found[0].run([1], 2, 0.0, 0).tokens == [2, 3]
    assert (tmp_path / "some.gguf.json").is_file()
    fakes.close(found)


def test_what_is_missing_is_said(place: Place) -> None:
    with pytest.raises(
        Unsupported,
        match=r"converter; `python -m foretell.measure.peers setup llama\.cpp` fetches it",
    ):
        peers.contenders("llama.cpp", place)
    with pytest.raises(Unsupported, match="float64"):
        peers.contenders("llama.cpp", Place(place.model, None, "float64", "cpu"))


def test_its_converter_comes_from_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], check: bool) -> None:
        assert check
        assert command[0] == "its python"
        assert command[-1] in pins("llama.cpp").split()
        with tarfile.open(
            Path(command[command.index("--dest") + 1]) / "x.tar.gz", "w:gz"
        ) as archive:
            for name in (
                "convert_hf_to_gguf.py",
                "conversion/base.py",
                "gguf-py/gguf/a.py",
                "src/llama.cpp",
                "conversion/../../out.py",
            ):
                info = tarfile.TarInfo(f"llama_cpp_python-1/vendor/llama.cpp/{name}")
                info.size = 1
                archive.addfile(info, io.BytesIO(b"#"))
            archive.addfile(tarfile.TarInfo("llama_cpp_python-1/conversion/other.py"))

    monkeypatch.setattr(subprocess, "run", run)
    llama_cpp.prepare("its python", tmp_path)
    found = sorted(
        p.relative_to(tmp_path / "sources").as_posix() for p in tmp_path.rglob("*") if p.is_file()
    )
    assert found == ["conversion/base.py", "convert_hf_to_gguf.py", "gguf-py/gguf/a.py"]


def test_the_real_one_decodes_as_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.same_as_ours("llama.cpp", False, tmp_path, monkeypatch)
