"""llama.cpp's converter to GGUF, which comes with the sources of llama-cpp-python."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from foretell.bench.peers._environment import pinned_packages

NAME = "llama.cpp"
CONVERTER = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")  # of the sources


def convert(options: dict[str, Any]) -> None:
    """Runs its converter, which knows a tokenizer by how it cuts a test text, and stops at one it
    does not know.
    """
    sources = Path(options["sources"])
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    model = importlib.import_module("conversion.base").TextModel
    find_tokenizer = model.get_vocab_base_pre

    def name_tokenizer(self: Any, tokenizer: Any) -> str:
        try:
            return str(find_tokenizer(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"  # how texts are cut does not matter: the model is given token ids

    model.get_vocab_base_pre = name_tokenizer
    sys.argv = ["", options["source"], "--outfile", options["out"], "--outtype", options["type"]]
    runpy.run_path(str(sources / "convert_hf_to_gguf.py"), run_name="__main__")


def prepare(python: str, folder: Path) -> None:
    """For `setup`: takes the converter out of the source distribution of the pinned version."""
    package = next(
        line for line in pinned_packages(NAME).split() if line.startswith("llama-cpp-python==")
    )
    with tempfile.TemporaryDirectory() as scratch:
        pip = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*pip, "--no-binary", "llama-cpp-python", package], check=True)
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
            for member in archive:
                name = member.name.partition("/vendor/llama.cpp/")[2]
                data = archive.extractfile(member)
                if data and name.startswith(CONVERTER) and ".." not in Path(name).parts:
                    path = folder / "sources" / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data.read())
