"""llama.cpp: plain, and with the prompt lookup of its binding drafting 2 or 10 tokens.

10 is the binding's default, 2 what its documentation advises for a CPU. The loop is of llama.cpp's
own functions, as its examples and its server call them; the binding's `Llama.generate` adds work in
Python to each step. The converter is that of its source distribution. For 4 bits it takes the .gguf
file that lies in the model's folder or beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foretell.bench.peers import Peer, Place, Run
from foretell.bench.peers._conversion import converted
from foretell.bench.peers._environment import Environment, environment
from foretell.bench.peers._gguf import convert, prepare
from foretell.bench.peers._worker import Worker
from foretell.errors import Unsupported

__all__ = ["contenders", "convert", "prepare", "start"]  # what a peer's file has

NAME = "llama.cpp"
FORMATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int8": "Q8_0"}
LOOKUPS = (2, 10)
CONTEXT = 4096  # tokens that its memory holds from the start; longer texts open a larger one
BATCH = 2048  # tokens of one call, its default


def contenders(place: Place) -> list[Peer]:
    where = environment(NAME, ["llama_cpp"], place)
    file, kind, name = _file(where, place)
    about = (
        f"llama-cpp-python {where.version('llama-cpp-python')}, {kind}, llama_decode and "
        f"llama_sampler_sample in a loop, n_threads=n_threads_batch={place.threads}"
    )
    common = {"file": str(file), "threads": place.threads, "eos": place.eos}
    found: list[Peer] = [Worker(name, about, where, common | {"lookup": 0})]
    for drafted in LOOKUPS:
        lookup = f"{about}, LlamaPromptLookupDecoding(num_pred_tokens={drafted})"
        options = common | {"lookup": drafted}
        found.append(Worker(f"{name} prompt lookup {drafted}", lookup, where, options))
    return found


def _file(where: Environment, place: Place) -> tuple[Path, str, str]:
    """The file that is measured, its number format in words, and the peer's name with it."""
    model = Path(place.model).expanduser()
    if place.model.endswith(".gguf"):
        return model, "the file as it is", NAME
    if place.dtype == "int4":
        files = sorted(model.glob("*.gguf")) or sorted(model.parent.glob("*.gguf"))
        if len(files) != 1:
            need = f"one .gguf file in the model's folder or beside it ({len(files)} are there)"
            raise Unsupported.missing(NAME, "int4", need, "put it there, or leave int4 out")
        kind = files[0].stem.rpartition(".")[2]  # such as Q4_1
        return files[0], f"{kind}, the model's own file", f"{NAME} {kind}"
    if place.dtype not in FORMATS:
        need = f"one of {', '.join(FORMATS)}, int4"
        raise Unsupported.missing(NAME, place.dtype, need, "choose another --dtype")
    if not (sources := where.folder / "sources").is_dir():
        cure = f"`python -m foretell.bench.peers setup {NAME}` fetches it"
        raise Unsupported.missing(NAME, "weights in safetensors", "llama.cpp's converter", cure)
    kind = FORMATS[place.dtype]
    given = {"sources": str(sources), "type": kind.lower()}
    return converted(where, place.model, kind, given, here=True), kind, f"{NAME} {kind}"


class Loop:
    """A model and its memory, and the steps that decode with them."""

    def __init__(self, options: dict[str, Any]):
        import llama_cpp.llama_cpp as lib

        self.lib = lib
        self.threads: int = options["threads"]
        lib.llama_backend_init()
        how = lib.llama_model_default_params()
        how.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(options["file"].encode(), how)
        if not self.model:
            raise ValueError("llama.cpp cannot read the file")
        self.context: Any = None
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self._open(CONTEXT)

    def _open(self, size: int) -> None:
        lib = self.lib
        if self.context is not None:
            lib.llama_free(self.context)
        how = lib.llama_context_default_params()
        how.n_ctx = self.size = size
        how.n_batch = BATCH
        how.n_threads = how.n_threads_batch = self.threads
        how.no_perf = True
        self.context = lib.llama_init_from_model(self.model, how)
        if not self.context:
            raise ValueError(f"llama.cpp has no room for {size} tokens")

    def clear(self, room: int) -> None:
        """Forgets all texts, and makes room for so many tokens."""
        if room > self.size:
            self._open(2 * room)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def sampler(self, temperature: float, seed: int) -> Any:
        lib = self.lib
        how = lib.llama_sampler_chain_default_params()
        how.no_perf = True
        chain = lib.llama_sampler_chain_init(how)
        if temperature:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        return chain

    def read(self, tokens: Sequence[int], start: int, rows: bool) -> None:
        """Takes in tokens from position `start` on. `rows`: logits of each, else of the last."""
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            batch = self.batch
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = start + first + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = rows or first + i + 1 == len(tokens)
            if code := self.lib.llama_decode(self.context, batch):
                raise ValueError(f"llama_decode ended with {code}")

    def forget(self, start: int) -> None:
        """Drops what stands from this position on."""
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_seq_rm(memory, 0, start, -1)

    def sample(self, chain: Any, row: int) -> int:
        return int(self.lib.llama_sampler_sample(chain, self.context, row))


def start(options: dict[str, Any]) -> Callable[..., Run]:
    import numpy
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    loop, ends = Loop(options), set(options["eos"])
    lookup: int = options["lookup"]
    drafter = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        loop.clear(len(ids) + max_new_tokens + lookup)
        chain = loop.sampler(temperature, seed)
        found = Run([], [], [])
        text = list(ids)
        began = time.perf_counter()
        loop.read(ids, 0, rows=False)
        draft: list[int] = []
        while True:
            count = 0
            for i in range(len(draft) + 1):
                token = loop.sample(chain, i if draft else -1)
                text.append(token)
                count += 1
                full = len(text) - len(ids) == max_new_tokens
                if token in ends or full or i == len(draft) or token != draft[i]:
                    break
            found.times.append(time.perf_counter() - began)
            found.counts.append(count)
            if token in ends or full:
                break
            held = len(text) - 1  # the last token is not taken in yet
            if draft:
                loop.forget(held)
            if drafter is not None:
                draft = drafter(numpy.array(text, dtype=numpy.intc)).tolist()
            loop.read([token, *draft], held, rows=bool(draft))
        loop.lib.llama_sampler_free(chain)
        found.tokens = text[len(ids) :]
        return found

    return run
