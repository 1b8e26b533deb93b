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
from foretell.bench.peers._conversion import convert_model
from foretell.bench.peers._environment import Environment, find_environment
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
    peer_environment = find_environment(NAME, ["llama_cpp"], place)
    file, number_format, name = _find_file(peer_environment, place)
    description = (
        f"llama-cpp-python {peer_environment.version('llama-cpp-python')}, {number_format}, "
        f"llama_decode and llama_sampler_sample in a loop, "
        f"n_threads=n_threads_batch={place.threads}"
    )
    common_options = {"file": str(file), "threads": place.threads, "eos": place.eos}
    workers: list[Peer] = [
        Worker(name, description, peer_environment, common_options | {"lookup": 0})
    ]
    for draft_length in LOOKUPS:
        lookup_description = (
            f"{description}, LlamaPromptLookupDecoding(num_pred_tokens={draft_length})"
        )
        options = common_options | {"lookup": draft_length}
        workers.append(
            Worker(
                f"{name} prompt lookup {draft_length}",
                lookup_description,
                peer_environment,
                options,
            )
        )
    return workers


def _find_file(peer_environment: Environment, place: Place) -> tuple[Path, str, str]:
    """The file that is measured, its number format in words, and the peer's name with it."""
    model = Path(place.model).expanduser()
    if place.model.endswith(".gguf"):
        return model, "the file as it is", NAME
    if place.dtype == "int4":
        files = sorted(model.glob("*.gguf")) or sorted(model.parent.glob("*.gguf"))
        if len(files) != 1:
            requirement = (
                f"one .gguf file in the model's folder or beside it ({len(files)} are there)"
            )
            raise Unsupported.missing_capability(
                NAME, "int4", requirement, "put it there, or leave int4 out"
            )
        number_format = files[0].stem.rpartition(".")[2]  # such as Q4_1
        return files[0], f"{number_format}, the model's own file", f"{NAME} {number_format}"
    if place.dtype not in FORMATS:
        requirement = f"one of {', '.join(FORMATS)}, int4"
        raise Unsupported.missing_capability(
            NAME, place.dtype, requirement, "choose another --dtype"
        )
    if not (sources := peer_environment.folder / "sources").is_dir():
        cure = f"`python -m foretell.bench.peers setup {NAME}` fetches it"
        raise Unsupported.missing_capability(
            NAME, "weights in safetensors", "llama.cpp's converter", cure
        )
    number_format = FORMATS[place.dtype]
    conversion_options = {"sources": str(sources), "type": number_format.lower()}
    return (
        convert_model(peer_environment, place.model, number_format, conversion_options, here=True),
        number_format,
        f"{NAME} {number_format}",
    )


class Loop:
    """A model and its memory, and the steps that decode with them."""

    def __init__(self, options: dict[str, Any]):
        import llama_cpp.llama_cpp as lib

        self.lib = lib
        self.threads: int = options["threads"]
        lib.llama_backend_init()
        model_options = lib.llama_model_default_params()
        model_options.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(options["file"].encode(), model_options)
        if not self.model:
            raise ValueError("llama.cpp cannot read the file")
        self.context: Any = None
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self._open_context(CONTEXT)

    def _open_context(self, size: int) -> None:
        lib = self.lib
        if self.context is not None:
            lib.llama_free(self.context)
        context_options = lib.llama_context_default_params()
        context_options.n_ctx = self.size = size
        context_options.n_batch = BATCH
        context_options.n_threads = context_options.n_threads_batch = self.threads
        context_options.no_perf = True
        self.context = lib.llama_init_from_model(self.model, context_options)
        if not self.context:
            raise ValueError(f"llama.cpp has no room for {size} tokens")

    def clear(self, needed_tokens: int) -> None:
        """Forgets all texts, and makes room for so many tokens."""
        if needed_tokens > self.size:
            self._open_context(2 * needed_tokens)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def sampler(self, temperature: float, seed: int) -> Any:
        lib = self.lib
        chain_options = lib.llama_sampler_chain_default_params()
        chain_options.no_perf = True
        chain = lib.llama_sampler_chain_init(chain_options)
        if temperature:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        return chain

    def read_tokens(self, tokens: Sequence[int], start: int, rows: bool) -> None:
        """Takes in tokens from position `start` on. `rows`: logits of each, else of the last."""
        for chunk_start in range(0, len(tokens), BATCH):
            chunk = tokens[chunk_start : chunk_start + BATCH]
            batch = self.batch
            batch.n_tokens = len(chunk)
            for offset, token in enumerate(chunk):
                batch.token[offset] = token
                batch.pos[offset] = start + chunk_start + offset
                batch.n_seq_id[offset] = 1
                batch.seq_id[offset][0] = 0
                batch.logits[offset] = rows or chunk_start + offset + 1 == len(tokens)
            if error_code := self.lib.llama_decode(self.context, batch):
                raise ValueError(f"llama_decode ended with {error_code}")

    def forget(self, start: int) -> None:
        """Drops what stands from this position on."""
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_seq_rm(memory, 0, start, -1)

    def sample(self, chain: Any, row: int) -> int:
        return int(self.lib.llama_sampler_sample(chain, self.context, row))


def start(options: dict[str, Any]) -> Callable[..., Run]:
    import numpy
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    loop, end_tokens = Loop(options), set(options["eos"])
    lookup_length: int = options["lookup"]
    drafter = LlamaPromptLookupDecoding(num_pred_tokens=lookup_length) if lookup_length else None

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        loop.clear(len(ids) + max_new_tokens + lookup_length)
        chain = loop.sampler(temperature, seed)
        result = Run([], [], [])
        text = list(ids)
        start_time = time.perf_counter()
        loop.read_tokens(ids, 0, rows=False)
        draft: list[int] = []
        while True:
            token_count = 0
            for position in range(len(draft) + 1):
                token = loop.sample(chain, position if draft else -1)
                text.append(token)
                token_count += 1
                is_full = len(text) - len(ids) == max_new_tokens
                if (
                    token in end_tokens
                    or is_full
                    or position == len(draft)
                    or token != draft[position]
                ):
                    break
            result.times.append(time.perf_counter() - start_time)
            result.counts.append(token_count)
            if token in end_tokens or is_full:
                break
            cached_tokens = len(text) - 1  # the last token is not taken in yet
            if draft:
                loop.forget(cached_tokens)
            if drafter is not None:
                draft = drafter(numpy.array(text, dtype=numpy.intc)).tolist()
            loop.read_tokens([token, *draft], cached_tokens, rows=bool(draft))
        loop.lib.llama_sampler_free(chain)
        result.tokens = text[len(ids) :]
        return result

    return run
