"""A GGUF file through llama.cpp: its kernels and number formats, its memory for the rows.

llama_branch.py says how its sequence ids stand for trees. Rows and ids are few and all requests
share them. Both are doubled when they run short; then idle branches lose theirs, and compute them
again when it is their turn.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretell.backends.llama_branch import Branch
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply
from foretell.errors import BadModel, PromptTooLong, RequestFailed, Unsupported
from foretell.models.gguf.limits import check
from foretell.models.gguf.llama_library import Log, library, open_model
from foretell.models.gguf.vocabulary import Vocabulary
from foretell.ops.threads import one_at_a_time

if TYPE_CHECKING:
    from foretell.core.request import Request

START_ROWS = 4096
START_IDS = 64
MOST_IDS = 256  # llama.cpp's limit
ROW_MEMORY = 4 << 30  # bytes that rows may take
REQUESTS = 16  # of the longest context, whose rows may be kept at once if that memory holds them
SPARE_ROWS = 1024  # for drafts, beyond the longest context
CALL_TOKENS = 2048  # of one call
CALL_ROWS = 256  # rows of logits of one call
WORKING_TOKENS = 128  # computed at once within a call, which its working memory is made for
PROVEN = frozenset({"llama", "qwen2", "qwen3"})  # compared with transformers in the project's tests
# llama.cpp's types of files; others compute with rows in float16.
FORMATS = {0: torch.float32, 1: torch.float16, 32: torch.bfloat16}
FLOAT32 = 0  # its number for rows in float32
NO_ROOM = 1  # what a forward returns where rows run short


class IdsExhausted(Exception):
    """All sequence ids are in use, and no branch is idle."""


class GGUF(Model):
    """A model in a .gguf file, on the CPU. `dtype` is what its numbers are good for: that of
    weights or of rows.

    Raises BadModel for a file that llama.cpp cannot read, Unsupported for a kind that trees cannot
    run on.
    """

    device = torch.device("cpu")
    layout = ()
    usual_executor = computed_by = "llama.cpp"
    context_handle: Any = None
    model_handle: Any = None

    def __init__(self, path: Path):
        check(path)
        self.lib = lib = library()
        self.path = path
        self.branches = weakref.WeakSet[Branch]()
        self.free_ids: list[int] = []
        self.id_count = 0
        self.model_handle = open_model(lib, path, vocab_only=False)
        self.tokenizer = Vocabulary(lib, self.model_handle)
        self.vocab = len(self.tokenizer)
        self.weight_bytes = int(lib.llama_model_size(self.model_handle))
        description = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.model_handle, description, len(description))
        self.name = f"{path.name} ({description.value.decode('utf-8', 'replace')})"
        self.family = self._header("general.architecture") or "unknown"
        for kind in ("is_recurrent", "is_hybrid", "has_encoder", "is_diffusion"):
            if getattr(lib, f"llama_model_{kind}")(self.model_handle):
                raise self._refuse(
                    f"a decoder with attention in every layer, which this one is not ({kind})"
                )
        stat = path.stat()
        # What tells this model from another.
        self.mark = f"{path.name} {stat.st_size} {stat.st_mtime_ns}"
        self.dtype = FORMATS.get(int(lib.llama_model_ftype(self.model_handle)), torch.float16)
        self._set_limits()
        self.threads = torch.get_num_threads()
        self._reopen(min(START_ROWS, self.most_rows), START_IDS)
        self._allocate_batch()
        if self.family not in PROVEN:
            self.self_test()

    def _refuse(self, capability: str) -> Unsupported:
        model = f"{self.name}, family {self.family}"
        return Unsupported.missing("foretell", model, capability, "use llama.cpp itself for it")

    def _header(self, key: str) -> str:
        """A value of the file's header as text; empty where it has none."""
        out = ctypes.create_string_buffer(512)
        size = self.lib.llama_model_meta_val_str(self.model_handle, key.encode(), out, len(out))
        return out.value.decode("utf-8", "replace") if size >= 0 else ""

    def _row_bytes(self) -> int:
        """The bytes of one row, keys and values of all layers."""
        lib, model = self.lib, self.model_handle
        usual = lib.llama_model_n_embd(model) // max(1, lib.llama_model_n_head(model))
        width = 0
        for side in ("key", "value"):
            width += int(self._header(f"{self.family}.attention.{side}_length") or usual)
        numbers = lib.llama_model_n_layer(model) * lib.llama_model_n_head_kv(model) * width
        return int(numbers) * (4 if self.dtype == torch.float32 else 2)

    def _set_limits(self) -> None:
        """The longest context, and how many rows there may be."""
        trained = self.lib.llama_model_n_ctx_train(self.model_handle)
        room = max(2 * SPARE_ROWS, ROW_MEMORY // max(1, self._row_bytes()))
        spare = SPARE_ROWS
        scaling = f"{self.family}.rope.scaling"
        original = self._header(f"{scaling}.original_context_length")
        if original and self._header(f"{scaling}.type") not in ("yarn", "linear"):
            # Beyond it the rotation depends on how many rows there are.
            room = trained = min(trained, int(original))
            spare = min(spare, room // 2)
        self.context = min(trained, room - spare)
        self.most_rows = min(room, max(self.context + spare, REQUESTS * self.context))

    def _allocate_batch(self) -> None:
        """The memory of what a call is given, written through numpy."""
        self.tokens = np.zeros(CALL_TOKENS, np.int32)
        self.positions = np.zeros(CALL_TOKENS, np.int32)
        self.single_ids = np.zeros(CALL_TOKENS, np.int32)  # where each token has one id
        self.ones = np.ones(CALL_TOKENS, np.int32)
        self.wanted = np.zeros(CALL_TOKENS, np.int8)
        offsets = 4 * np.arange(CALL_TOKENS, dtype=np.uint64)
        self.single_addresses = self.single_ids.ctypes.data + offsets
        types = dict(self.lib.llama_batch._fields_)

        def pointer(array: np.ndarray, field: str) -> Any:
            return ctypes.cast(int(array.ctypes.data), types[field])

        self.one_each = pointer(self.ones, "n_seq_id")
        self.single_each = pointer(self.single_addresses, "seq_id")
        self.batch = self.lib.llama_batch(
            0,
            pointer(self.tokens, "token"),
            None,
            pointer(self.positions, "pos"),
            self.one_each,
            self.single_each,
            pointer(self.wanted, "logits"),
        )
        # The address as a number: the binding's own prototype makes an object of it each time.
        self.logits_address = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(
            ("llama_get_logits", self.lib._lib)
        )

    # --- ids and rows

    def _reopen(self, rows: int, ids: int) -> None:
        """A memory of this size with all that the old one holds."""
        lib, old = self.lib, self.context_handle
        options = lib.llama_context_default_params()
        options.n_ctx = rows
        options.n_seq_max = ids
        options.kv_unified = True
        options.swa_full = True
        options.n_batch = CALL_TOKENS
        options.n_ubatch = WORKING_TOKENS
        options.n_outputs_max = CALL_ROWS
        # Its flash attention on a CPU takes up to twice as long for a tree below a long text, and
        # rounds more.
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.n_threads = options.n_threads_batch = self.threads
        options.no_perf = True
        if self.dtype == torch.float32:
            options.type_k = options.type_v = FLOAT32
        new = lib.llama_init_from_model(self.model_handle, options)
        if not new:
            raise BadModel(
                f"{self.name}: llama.cpp has no room for {rows} rows ({Log.reason()}); "
                "free memory or take a smaller model"
            )
        if old:
            self._move(old, new)
        self.context_handle = new
        self.memory_handle = lib.llama_get_memory(new)
        self.free_ids += range(self.id_count, ids)
        self.id_count = ids
        self.row_count = int(lib.llama_n_ctx(new))
        # Tokens of a call: more than llama.cpp agrees to would end the process.
        self.call_tokens = min(CALL_TOKENS, int(lib.llama_n_batch(new)))

    def _move(self, old: Any, new: Any) -> None:
        """Moves all rows from one memory to another, and frees the old one."""
        lib = self.lib
        size = lib.llama_state_get_size(old)
        state = (ctypes.c_uint8 * size)()
        read = lib.llama_state_get_data(old, state, size)
        if read != size or lib.llama_state_set_data(new, state, size) != size:
            lib.llama_free(new)
            raise BadModel(f"{self.name}: llama.cpp cannot move its rows ({Log.reason()})")
        lib.llama_free(old)

    def cut(self, number: int, start: int) -> None:
        self.lib.llama_memory_seq_rm(self.memory_handle, number, start, -1)

    def share(self, source: int, number: int, start: int, end: int) -> None:
        self.lib.llama_memory_seq_cp(self.memory_handle, source, number, start, end)

    def release(self, number: int) -> None:
        if self.context_handle:
            self.cut(number, 0)
            self.free_ids.append(number)

    def reserve(self, count: int, busy: set[Cache], owner: Branch) -> list[int]:
        """So many ids that no row carries. `owner` keeps its unused ids. Raises IdsExhausted."""
        while len(self.free_ids) < count:
            if self.id_count < MOST_IDS:
                self._reopen(self.row_count, min(MOST_IDS, 2 * self.id_count))
            elif not (self._take_unused_ids(owner) or self._evict(busy)):
                raise IdsExhausted
        return [self.free_ids.pop() for _ in range(count)]

    def _take_unused_ids(self, owner: Branch) -> bool:
        """Takes back the ids that other branches keep for a next tree; False if there are none."""
        before = len(self.free_ids)
        for branch in self.branches:
            if branch is owner or branch.changing:
                continue
            for sequence in branch.sequences[1:]:
                if not sequence.path:
                    branch.sequences.remove(sequence)
                    self.release(sequence.number)
        return len(self.free_ids) > before

    def _evict(self, busy: set[Cache]) -> bool:
        """Makes the branch that was idle longest forget its rows; False if none is idle."""
        idle = [b for b in self.branches if b.sequences and b not in busy]
        if idle:
            min(idle, key=lambda branch: branch.last_used).forget()
        return bool(idle)

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Branch:
        branch = Branch(self)
        self.prepared(branch, request, beside)
        return branch

    # --- the forward

    @one_at_a_time
    def forward(self, jobs: Sequence[Job]) -> list[Reply]:
        """One call for all jobs where memory and ids suffice, else as few as it takes."""
        self.calls += 1
        self.width = sum(len(job.tokens) for job in jobs)
        threads = self.threads_wanted or torch.get_num_threads()
        if self.threads != threads:
            self.threads = threads
            self.lib.llama_set_n_threads(self.context_handle, threads, threads)
        if len(jobs) == 1 and self._fill_single(jobs[0]):
            logits = torch.empty(1, self.vocab)
            self._decode({jobs[0].cache}, 1)
            self._copy_logits(logits)
            self._finish(jobs)
            return [self._reply(jobs[0], logits)]
        logits = torch.empty(sum(len(job.rows) for job in jobs), self.vocab)
        busy = {job.cache for job in jobs}
        left = [*jobs]
        row = 0
        while left:
            group, ids = self._place(left, busy)
            row = self._run(group, ids, logits, row, busy)
            self._finish(group)
            busy -= {job.cache for job in group}
            del left[: len(group)]
        replies = []
        row = 0
        for job in jobs:
            end = row + len(job.rows)
            replies.append(self._reply(job, logits[row:end]))
            row = end
        return replies

    def _reply(self, job: Job, logits: torch.Tensor) -> Reply:
        nodes = [row + job.first for row in job.rows]
        new = list(range(job.first, job.first + len(job.tokens)))
        return Reply(logits, {}, nodes, new, computed_by=self.computed_by)

    def _finish(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            branch: Any = job.cache
            branch.finish()
            branch.changing = False
            branch.last_used = self.calls

    def _fill_single(self, job: Job) -> bool:
        """The batch of one token below a branch of one id, all that plain decoding asks; False if
        this is more.
        """
        branch: Any = job.cache
        if len(job.tokens) != 1 or not job.rows or len(branch.sequences) != 1:
            return False
        sequence = branch.sequences[0]
        if sequence.path or job.start != branch.length:
            return False
        branch.changing = True
        sequence.path.append(0)
        self.tokens[0] = job.tokens[0]
        self.positions[0] = job.scratch_positions[0]
        self.wanted[0] = 1
        self.single_ids[0] = sequence.number
        self.batch.n_tokens = 1
        self.batch.n_seq_id = self.one_each
        self.batch.seq_id = self.single_each
        return True

    def _place(self, jobs: Sequence[Job], busy: set[Cache]) -> tuple[list[Job], list[list[int]]]:
        """The first of these jobs for which ids suffice, and the ids of each of their tokens."""
        group: list[Job] = []
        ids: list[list[int]] = []
        for job in jobs:
            branch: Any = job.cache
            parents = branch.plan.parents
            shared = job.start - branch.length
            try:
                fresh = self.reserve(branch.missing_ids(parents, shared), busy, branch)
            except IdsExhausted:
                if group:
                    break
                raise self._refuse(
                    f"trees of fewer than {MOST_IDS} leaves, which is how many sequences llama.cpp "
                    "tells apart"
                ) from None
            ids += branch.place(parents, shared, fresh, job.seen is None)
            group.append(job)
        return group, ids

    def _run(
        self,
        group: Sequence[Job],
        ids: list[list[int]],
        logits: torch.Tensor,
        row: int,
        busy: set[Cache],
    ) -> int:
        """Computes the group's tokens and writes their rows to `logits` from `row` on; returns
        where they end.
        """
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for job in group:
            wanted += [len(tokens) + r for r in job.rows]
            tokens += job.tokens
            positions += job.positions
        out = logits[row : row + len(wanted)]
        # llama.cpp gives rows in the tokens' order, each once.
        ordered = wanted
        if any(a >= b for a, b in itertools.pairwise(wanted)):
            ordered = sorted(set(wanted))
            out = torch.empty(len(ordered), self.vocab)
        start = done = 0
        while start < len(tokens):
            next_row = ordered[done + CALL_ROWS : done + CALL_ROWS + 1]  # one too many for a call
            end = min(start + self.call_tokens, len(tokens), *next_row)
            count = bisect_left(ordered, end) - done
            rows = [r - start for r in ordered[done : done + count]]
            self._fill(tokens[start:end], positions[start:end], ids[start:end], rows)
            self._decode(busy, len(group))
            if count:
                self._copy_logits(out[done : done + count])
            start = end
            done += count
        if ordered is not wanted:
            logits[row : row + len(wanted)] = out[[bisect_left(ordered, r) for r in wanted]]
        return row + len(wanted)

    def _copy_logits(self, out: torch.Tensor) -> None:
        """Copies the last call's rows to `out` (k, V), as many as it has."""
        source = self.logits_address(self.context_handle)
        ctypes.memmove(out.data_ptr(), source, 4 * out.numel())

    def _fill(
        self, tokens: list[int], positions: list[int], ids: list[list[int]], rows: list[int]
    ) -> None:
        """Writes the batch of one call; `rows`: tokens whose logits are wanted."""
        count, batch = len(tokens), self.batch
        batch.n_tokens = count
        self.tokens[:count] = tokens
        self.positions[:count] = positions
        self.wanted[:count] = 0
        self.wanted[rows] = 1
        flat = list(itertools.chain.from_iterable(ids))
        if len(flat) == count:
            self.single_ids[:count] = flat
            batch.n_seq_id, batch.seq_id = self.one_each, self.single_each
            return
        all_ids = np.array(flat, np.int32)
        counts = np.array([len(each) for each in ids], np.int32)
        begins = counts.cumsum(dtype=np.uint64) - counts.astype(np.uint64)
        addresses = int(all_ids.ctypes.data) + 4 * begins
        self.held_ids = (all_ids, counts, addresses)  # while the batch points to them
        batch.n_seq_id = ctypes.cast(int(counts.ctypes.data), type(batch.n_seq_id))
        batch.seq_id = ctypes.cast(int(addresses.ctypes.data), type(batch.seq_id))

    def _decode(self, busy: set[Cache], requests: int) -> None:
        """The call; where there is no room for its rows, makes some and tries again."""
        Log.errors.clear()
        while code := self.lib.llama_decode(self.context_handle, self.batch):
            if code != NO_ROOM:
                raise RequestFailed(
                    f"{self.name}: llama.cpp could not compute a forward ({Log.reason()})"
                )
            if self.row_count < self.most_rows:
                self._reopen(min(self.most_rows, 2 * self.row_count), self.id_count)
            elif not self._evict(busy):
                raise PromptTooLong(
                    f"{self.name}: {requests} requests at once need more than the {self.row_count} "
                    "rows there is memory for; send fewer, or shorter ones"
                )

    @torch.inference_mode()
    def self_test(self) -> None:
        """A tree below a prompt in pieces must give the rows of its paths. Raises Unsupported."""
        probe = [(1 + 37 * i) % self.vocab for i in range(7)]
        tree = TokenTree(probe[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        cache, done = self.cache(), False
        try:
            while not done:
                job, done = cache.prepare(Ask(tree), probe, 3)
                reply = self.forward([job])[0]
            cache.drop()
            paths = [self.score([*probe, *tree.tokens_to(node)])[0] for node in range(len(tree))]
        except RequestFailed as error:
            raise self._refuse(
                f"a tree, and a self-test found that it takes none ({error})"
            ) from error
        for row, path in zip(reply.logits, paths, strict=True):
            if not float((row - path).abs().max()) <= 0.05 * float(path.abs().max()):
                raise self._refuse(
                    "a tree to give the rows of its paths, and a self-test found that it does not"
                )

    def __del__(self) -> None:
        context, self.context_handle = self.context_handle, None
        model, self.model_handle = self.model_handle, None
        if context:
            self.lib.llama_free(context)
        if model:
            self.lib.llama_model_free(model)
