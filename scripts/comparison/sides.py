"""Who is compared: foretell's methods and the peers, each number format in processes of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from foretell.bench import peers
from foretell.bench.peers import Place, Run, transformers
from foretell.bench.peers._worker import Worker
from foretell.bench.turns import one_line_reason
from foretell.errors import BadConfig, ForetellError, RequestFailed
from foretell.loading.names import aliases

OURS = "foretell"
BASE = "transformers"  # it has 16 bits only, and takes part in every run
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
FILE = "file"  # a .gguf file in the formats that it has
FILE_PEERS = ("llama.cpp",)  # who runs one
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Here:
    """The environment of this process, in which foretell itself runs."""

    def command(self, task: str, options: dict[str, Any]) -> list[str]:
        return [sys.executable, "-m", "comparison.ours", json.dumps(options)]

    def variables(self) -> dict[str, str]:
        scripts = Path(__file__).resolve().parent.parent
        paths = [str(scripts), str(scripts.parent), os.environ.get("PYTHONPATH", "")]
        return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass(frozen=True)
class Contender:
    """One way of decoding. `method`: of ours; `plain`: without drafts; `worker`: its process."""

    name: str
    about: str
    bits: int
    plain: bool
    worker: Worker
    method: str | None = None

    @property
    def ours(self) -> bool:
        return self.method is not None

    def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        """`ids` -> the new tokens, and when they came. Raises RequestFailed."""
        if self.method is None:
            return self.worker.run(ids, max_new_tokens, temperature, seed)
        request = {
            "method": self.method,
            "ids": ids,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        return self.worker.generation(request)

    def describe(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "bits": self.bits,
            "plain": self.plain,
            "method": self.method,
            "process": self.worker.name,
        }


@dataclass
class Sides:
    """All contenders. `opened`: what loading took, by process; `absent`: why a peer is not here."""

    contenders: list[Contender] = field(default_factory=list)
    opened: dict[str, dict[str, Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def workers(self) -> list[Worker]:
        """Of the contenders, each once."""
        return list({id(c.worker): c.worker for c in self.contenders}.values())

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def drop(self, contender: Contender, why: str) -> None:
        self.contenders = [c for c in self.contenders if c is not contender]
        self.absent[contender.name] = why


def check_dtypes(names: Sequence[str]) -> list[str]:
    """Number formats by their full names. Raises BadConfig."""
    full = [SHORT.get(name, name) for name in names]
    for name in full:
        if name not in (FILE, *BITS):
            raise BadConfig.field("--dtypes", name, f"one of {', '.join([*SHORT, *BITS, FILE])}")
    return full


def usual_dtypes(model: str) -> str:
    """Number formats, with commas, in which a model is compared where none are named."""
    known = aliases()
    is_file = model.endswith(".gguf") or (model in known and known[model].run == "file")
    return FILE if is_file else "bf16,int8,int4"


@cache
def bits_of(dtype: str, path: str | None) -> int:
    """Bits a weight; of a .gguf file the mean over its weights, rounded."""
    if dtype != FILE:
        return BITS[dtype]
    from foretell.models.gguf.header import read_header

    tensors = read_header(Path(str(path))).tensors.values()
    weights = sum(int(tensor.n_elements) for tensor in tensors)
    return round(8 * sum(int(tensor.nbytes) for tensor in tensors) / weights)


def open_host(model: str, dtype: str, threads: int) -> tuple[Worker, dict[str, Any]]:
    """Foretell's process for one number format, loaded, and what it says of the model.

    Raises RequestFailed where it does not load, and BadConfig where it is to run a .gguf file and
    the model is none.
    """
    options = {"model": model, "dtype": "auto" if dtype == FILE else dtype, "threads": threads}
    where: Any = Here()
    worker = Worker(f"{OURS} {dtype}", "foretell.load", where, options)
    began = time.perf_counter()
    told = worker.ask({"open": True})
    told["ready_s"] = time.perf_counter() - began
    if dtype == FILE and not str(told["path"]).endswith(".gguf"):
        worker.close()
        raise BadConfig(f"--dtypes {FILE}: {model} is no .gguf file; name other formats")
    return worker, told


def note_opened(sides: Sides, worker: Worker, load_s: float, ready_s: float) -> None:
    """Notes what loading took. Sizes are of the whole process, in bytes."""
    loaded, peak = worker.memory() or (None, None)
    sides.opened[worker.name] = {
        "load_s": load_s,
        "ready_s": ready_s,
        "loaded_bytes": loaded,
        "loading_peak_bytes": peak,
    }


def add_ours(
    sides: Sides, worker: Worker, told: dict[str, Any], dtype: str, methods: Sequence[str]
) -> None:
    """The contenders of a process that `open_host` opened."""
    note_opened(sides, worker, told["opened"], told["ready_s"])
    sides.opened[worker.name] |= {"executor": told["executor"], "weight_bytes": told["weights"]}
    for method in methods:
        sides.contenders.append(
            Contender(
                f"{OURS} {dtype} {method}",
                f"steps by {told['executor']}",
                bits_of(dtype, told["path"]),
                method == "plain",
                worker,
                method,
            )
        )


def add_peer(sides: Sides, name: str, place: Place) -> None:
    """All ways of a peer that open here; of the others it is noted why they do not."""
    try:
        if name == BASE:
            found: list[Any] = list(transformers.separate_workers(place))
        else:
            found = list(peers.contenders(name, place))
    except ForetellError as error:
        sides.absent[f"{name} {place.dtype}"] = one_line_reason(error)
        return
    for i, worker in enumerate(found):
        try:
            began = time.perf_counter()
            load_s = worker.open()
        except RequestFailed as error:
            sides.absent[worker.name] = one_line_reason(error)
            continue
        note_opened(sides, worker, load_s, time.perf_counter() - began)
        bits = bits_of(place.dtype, place.model)
        sides.contenders.append(Contender(worker.name, worker.about, bits, i == 0, worker))


def peers_of(dtype: str) -> list[str]:
    """The peers that have a number format, or may have; transformers stands for itself."""
    if dtype == FILE:
        return list(FILE_PEERS)
    names = [name for name in peers.peer_names() if name != BASE]
    if dtype != "int8":
        names.remove("ctranslate2")  # beside 16 bits it computes in 32, and it has no 4
    return names
