"""llama.cpp as a peer: what it is called with, what comes back, and how its converter is run."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from foretell.bench import peers
from foretell.bench.peers import Place, llama_cpp
from foretell.bench.peers._environment import peer_folder, pinned_packages
from foretell.errors import Unsupported
from tests.bench.peers import fakes

PACKAGE = """
import json
from types import SimpleNamespace

told = {"opened": [], "kept": [], "threads": None, "freed": 0}

def llama_backend_init():
    print("what a library prints is no answer")

def llama_model_default_params():
    return SimpleNamespace(n_gpu_layers=99)

def llama_model_load_from_file(file, how):
    assert how.n_gpu_layers == 0
    told["file"] = file.decode()
    return 1

def llama_batch_init(size, width, sequences):
    assert (width, sequences) == (0, 1)
    one = lambda: [0] * size
    batch = SimpleNamespace(token=one(), pos=one(), n_seq_id=one(), logits=one())
    batch.seq_id = [[None] for _ in range(size)]
    return batch

def llama_context_default_params():
    return SimpleNamespace()

def llama_init_from_model(model, how):
    told["opened"].append(how.n_ctx)
    told["threads"] = [how.n_threads, how.n_threads_batch]
    return SimpleNamespace(rows=[], logits=[], n_ctx=how.n_ctx)

def llama_free(context):
    told["freed"] += 1

def llama_get_memory(context):
    return context

def llama_memory_clear(memory, data):
    memory.rows = []

def llama_memory_seq_rm(memory, sequence, first, last):
    assert (sequence, last) == (0, -1)
    memory.rows = memory.rows[:first]

def llama_decode(context, batch):
    context.logits = []
    for i in range(batch.n_tokens):
        assert batch.pos[i] == len(context.rows), "each token follows those before it"
        assert batch.seq_id[i] == [0]
        context.rows.append(batch.token[i])
        if batch.logits[i]:
            context.logits.append(batch.token[i])
    return 0 if len(context.rows) <= context.n_ctx else 1

def llama_sampler_chain_default_params():
    return SimpleNamespace()

def llama_sampler_chain_init(how):
    return []

def llama_sampler_init_greedy():
    return "greedy"

def llama_sampler_init_temp(temperature):
    return temperature

def llama_sampler_init_dist(seed):
    return ["seed", seed]

def llama_sampler_chain_add(chain, sampler):
    chain.append(sampler)

def llama_sampler_free(chain):
    told["chain"] = chain
    with open(told["file"] + ".json", "w") as out:
        json.dump(told, out)

def llama_sampler_sample(chain, context, row):
    return context.logits[row] + 1
"""
LOOKUP = """
import numpy

class LlamaPromptLookupDecoding:
    '''Knows the next token, and gets the one after it wrong.'''

    def __init__(self, num_pred_tokens):
        self.number = num_pred_tokens

    def __call__(self, text):
        return numpy.array([text[-1] + 1, *([0] * (self.number - 1))], dtype=numpy.intc)
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
    files = {
        "llama_cpp/__init__.py": "",
        "llama_cpp/llama_cpp.py": PACKAGE,
        "llama_cpp/llama_speculative.py": LOOKUP,
    }
    fakes.install(tmp_path, files, monkeypatch)
    return Place(str(tmp_path / "model"), None, "bfloat16", "cpu", 3, (9,))


@pytest.fixture
def sources(place: Place) -> None:
    files = {"convert_hf_to_gguf.py": CONVERTER, "conversion/base.py": BASE, "gguf-py/gguf.py": ""}
    for name, text in files.items():
        path = peer_folder("llama.cpp") / "sources" / name
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
    (file,) = (peer_folder("llama.cpp") / "models").iterdir()
    assert json.loads(file.read_text()) == [place.model, kind.lower(), ["gpt-2", "known"]]
    told: dict[str, Any] = {}
    for peer, lookup in zip(found, (0, 2, 10), strict=True):
        run = peer.run([4, 5], 6, 0.0, 7)
        assert run.tokens == [6, 7, 8, 9], "9 ends a text"
        assert run.counts == ([1, 2, 1] if lookup else [1, 1, 1, 1])
        assert run.times == sorted(run.times)
        told = json.loads(Path(f"{file}.json").read_text())
        assert (told["threads"], told["chain"], told["opened"]) == ([3, 3], ["greedy"], [4096])
    assert found[2].run([1], 3, 0.5, 8).tokens == [2, 3, 4], "within a step"
    told = json.loads(Path(f"{file}.json").read_text())
    assert told["chain"] == [0.5, ["seed", 8]]
    for peer in (found[0], found[2]):
        assert len(peer.run([10] * 5000, 50, 0.0, 0).tokens) == 50
        told = json.loads(Path(f"{file}.json").read_text())
        assert told["opened"][-1] > 5050, "a prompt that is too long opens it again"
        assert told["freed"] == 1
    fakes.close(found)


def test_4_bits_are_the_file_beside_the_model(place: Place, tmp_path: Path) -> None:
    asked = Place(place.model, None, "int4", "cpu")
    with pytest.raises(Unsupported, match=r"one \.gguf file .* \(0 are there\)"):
        peers.contenders("llama.cpp", asked)
    (tmp_path / "Some-7B.Q4_1.gguf").write_text("")
    found = peers.contenders("llama.cpp", asked)
    assert found[1].name == "llama.cpp Q4_1 prompt lookup 2"
    assert "the model's own file" in found[1].about
    assert found[1].run([1], 2, 0.0, 0).tokens == [2, 3]
    (tmp_path / "model" / "A.Q4_0.gguf").write_text("")
    (tmp_path / "model" / "B.Q4_0.gguf").write_text("")
    with pytest.raises(Unsupported, match=r"\(2 are there\)"):
        peers.contenders("llama.cpp", asked)
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
        match=r"converter; `python -m foretell.bench.peers setup llama\.cpp` fetches it",
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
        assert command[-1] in pinned_packages("llama.cpp").split()
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
