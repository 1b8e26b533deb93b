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
from foretell.models.gguf.limits import check_file
from foretell.models.gguf.llama_library import Log, load_library, open_model
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
    usual_backend = computed_by = "llama.cpp"
    context_handle: Any = None
    model_handle: Any = None

    def __init__(self, file_path: Path):
        check_file(file_path)
        self.lib = lib = load_library()
        self.path = file_path
        self.branches = weakref.WeakSet[Branch]()
        self.free_ids: list[int] = []
        self.id_count = 0
        self.model_handle = open_model(lib, file_path)
        self.tokenizer = Vocabulary(lib, self.model_handle)
        self.vocab = len(self.tokenizer)
        self.weight_bytes = int(lib.llama_model_size(self.model_handle))
        description = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.model_handle, description, len(description))
        self.name = f"{file_path.name} ({description.value.decode('utf-8', 'replace')})"
        self.family = self._header_value("general.architecture") or "unknown"
        for model_kind in ("is_recurrent", "is_hybrid", "has_encoder", "is_diffusion"):
            if getattr(lib, f"llama_model_{model_kind}")(self.model_handle):
                raise self._refusal_error(
                    f"a decoder with attention in every layer, which this one is not ({model_kind})"
                )
        file_status = file_path.stat()
        # What tells this model from another.
        self.mark = f"{file_path.name} {file_status.st_size} {file_status.st_mtime_ns}"
        self.dtype = FORMATS.get(int(lib.llama_model_ftype(self.model_handle)), torch.float16)
        self._set_limits()
        self.threads = torch.get_num_threads()
        self._open_memory(min(START_ROWS, self.most_rows), START_IDS)
        self._allocate_batch()
        if self.family not in PROVEN:
            self.self_test()

    def _refusal_error(self, capability: str) -> Unsupported:
        model_title = f"{self.name}, family {self.family}"
        return Unsupported.missing_capability(
            "foretell", model_title, capability, "use llama.cpp itself for it"
        )

    def _header_value(self, header_key: str) -> str:
        """A value of the file's header as text; empty where it has none."""
        buffer = ctypes.create_string_buffer(512)
        byte_count = self.lib.llama_model_meta_val_str(
            self.model_handle, header_key.encode(), buffer, len(buffer)
        )
        return buffer.value.decode("utf-8", "replace") if byte_count >= 0 else ""

    def _row_bytes(self) -> int:
        """The bytes of one row, keys and values of all layers."""
        lib, model = self.lib, self.model_handle
        default_width = lib.llama_model_n_embd(model) // max(1, lib.llama_model_n_head(model))
        total_width = 0
        for side in ("key", "value"):
            total_width += int(
                self._header_value(f"{self.family}.attention.{side}_length") or default_width
            )
        number_count = (
            lib.llama_model_n_layer(model) * lib.llama_model_n_head_kv(model) * total_width
        )
        return int(number_count) * (4 if self.dtype == torch.float32 else 2)

    def _set_limits(self) -> None:
        """Sets the longest context, and how many rows there may be."""
        trained_context = self.lib.llama_model_n_ctx_train(self.model_handle)
        max_rows = max(2 * SPARE_ROWS, ROW_MEMORY // max(1, self._row_bytes()))
        spare_rows = SPARE_ROWS
        key_prefix = f"{self.family}.rope.scaling"
        original_context = self._header_value(f"{key_prefix}.original_context_length")
        if original_context and self._header_value(f"{key_prefix}.type") not in ("yarn", "linear"):
            # Beyond it the rotation depends on how many rows there are.
            max_rows = trained_context = min(trained_context, int(original_context))
            spare_rows = min(spare_rows, max_rows // 2)
        self.context = min(trained_context, max_rows - spare_rows)
        self.most_rows = min(max_rows, max(self.context + spare_rows, REQUESTS * self.context))

    def _allocate_batch(self) -> None:
        """Allocates the memory of what a call is given, written through numpy."""
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

    def _open_memory(self, row_count: int, id_count: int) -> None:
        """Opens a memory of this size with all that the old one holds."""
        lib, old_context = self.lib, self.context_handle
        options = lib.llama_context_default_params()
        options.n_ctx = row_count
        options.n_seq_max = id_count
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
        new_context = lib.llama_init_from_model(self.model_handle, options)
        if not new_context:
            raise BadModel(
                f"{self.name}: llama.cpp has no room for {row_count} rows ({Log.reason()}); "
                "free memory or take a smaller model"
            )
        if old_context:
            self._move_rows(old_context, new_context)
        self.context_handle = new_context
        self.memory_handle = lib.llama_get_memory(new_context)
        self.free_ids += range(self.id_count, id_count)
        self.id_count = id_count
        self.row_count = int(lib.llama_n_ctx(new_context))
        # Tokens of a call: more than llama.cpp agrees to would end the process.
        self.call_tokens = min(CALL_TOKENS, int(lib.llama_n_batch(new_context)))

    def _move_rows(self, old_context: Any, new_context: Any) -> None:
        """Moves all rows from one memory to another, and frees the old one."""
        lib = self.lib
        state_size = lib.llama_state_get_size(old_context)
        state = (ctypes.c_uint8 * state_size)()
        read_size = lib.llama_state_get_data(old_context, state, state_size)
        if (
            read_size != state_size
            or lib.llama_state_set_data(new_context, state, state_size) != state_size
        ):
            lib.llama_free(new_context)
            raise BadModel(f"{self.name}: llama.cpp cannot move its rows ({Log.reason()})")
        lib.llama_free(old_context)

    def cut_rows(self, sequence_id: int, start: int) -> None:
        self.lib.llama_memory_seq_rm(self.memory_handle, sequence_id, start, -1)

    def share(self, source: int, sequence_id: int, start: int, end: int) -> None:
        self.lib.llama_memory_seq_cp(self.memory_handle, source, sequence_id, start, end)

    def release(self, sequence_id: int) -> None:
        if self.context_handle:
            self.cut_rows(sequence_id, 0)
            self.free_ids.append(sequence_id)

    def reserve(self, count: int, busy: set[Cache], owner: Branch) -> list[int]:
        """Reserves so many ids that no row carries. `owner` keeps its unused ids. Raises
        IdsExhausted.
        """
        while len(self.free_ids) < count:
            if self.id_count < MOST_IDS:
                self._open_memory(self.row_count, min(MOST_IDS, 2 * self.id_count))
            elif not (self._take_unused_ids(owner) or self._evict_idle(busy)):
                raise IdsExhausted
        return [self.free_ids.pop() for _ in range(count)]

    def _take_unused_ids(self, owner: Branch) -> bool:
        """Takes back the ids that other branches keep for a next tree; False if there are none."""
        free_before = len(self.free_ids)
        for branch in self.branches:
            if branch is owner or branch.changing:
                continue
            for sequence in branch.sequences[1:]:
                if not sequence.path:
                    branch.sequences.remove(sequence)
                    self.release(sequence.number)
        return len(self.free_ids) > free_before

    def _evict_idle(self, busy: set[Cache]) -> bool:
        """Makes the branch that was idle longest forget its rows; False if none is idle."""
        idle_branches = [
            idle_branch
            for idle_branch in self.branches
            if idle_branch.sequences and idle_branch not in busy
        ]
        if idle_branches:
            min(idle_branches, key=lambda branch: branch.last_used).forget()
        return bool(idle_branches)

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Branch:
        branch = Branch(self)
        self.prepare_cache(branch, request, beside)
        return branch

    # --- the forward

    @one_at_a_time
    def forward(self, jobs: Sequence[Job]) -> list[Reply]:
        """Computes all jobs in one call where memory and ids suffice, else in as few as needed."""
        self.calls += 1
        self.width = sum(len(job.tokens) for job in jobs)
        threads = self.threads_wanted or torch.get_num_threads()
        if self.threads != threads:
            self.threads = threads
            self.lib.llama_set_n_threads(self.context_handle, threads, threads)
        if len(jobs) == 1 and self._fill_single(jobs[0]):
            logits = torch.empty(1, self.vocab)
            self._decode_batch({jobs[0].cache}, 1)
            self._copy_logits(logits)
            self._finish_jobs(jobs)
            return [self._build_reply(jobs[0], logits)]
        logits = torch.empty(sum(len(job.rows) for job in jobs), self.vocab)
        busy = {job.cache for job in jobs}
        remaining_jobs = [*jobs]
        first_row = 0
        while remaining_jobs:
            group, node_ids = self._place_jobs(remaining_jobs, busy)
            first_row = self._run_group(group, node_ids, logits, first_row, busy)
            self._finish_jobs(group)
            busy -= {job.cache for job in group}
            del remaining_jobs[: len(group)]
        replies = []
        first_row = 0
        for job in jobs:
            end_row = first_row + len(job.rows)
            replies.append(self._build_reply(job, logits[first_row:end_row]))
            first_row = end_row
        return replies

    def _build_reply(self, job: Job, logits: torch.Tensor) -> Reply:
        nodes = [row + job.first for row in job.rows]
        new_nodes = list(range(job.first, job.first + len(job.tokens)))
        return Reply(logits, {}, nodes, new_nodes, computed_by=self.computed_by)

    def _finish_jobs(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            branch: Any = job.cache
            branch.finish()
            branch.changing = False
            branch.last_used = self.calls

    def _fill_single(self, job: Job) -> bool:
        """Writes the batch of one token below a branch of one id, all that plain decoding asks;
        False if this is more.
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

    def _place_jobs(
        self, jobs: Sequence[Job], busy: set[Cache]
    ) -> tuple[list[Job], list[list[int]]]:
        """The first of these jobs for which ids suffice, and the ids of each of their tokens."""
        group: list[Job] = []
        node_ids: list[list[int]] = []
        for job in jobs:
            branch: Any = job.cache
            parents = branch.plan.parents
            first_new = job.start - branch.length
            try:
                new_ids = self.reserve(branch.missing_ids(parents, first_new), busy, branch)
            except IdsExhausted:
                if group:
                    break
                raise self._refusal_error(
                    f"trees of fewer than {MOST_IDS} leaves, which is how many sequences llama.cpp "
                    "tells apart"
                ) from None
            node_ids += branch.assign_ids(parents, first_new, new_ids, job.seen is None)
            group.append(job)
        return group, node_ids

    def _run_group(
        self,
        group: Sequence[Job],
        node_ids: list[list[int]],
        logits: torch.Tensor,
        row: int,
        busy: set[Cache],
    ) -> int:
        """Computes the group's tokens and writes their rows to `logits` from `row` on; returns
        where they end.
        """
        tokens: list[int] = []
        positions: list[int] = []
        wanted_rows: list[int] = []
        for job in group:
            wanted_rows += [len(tokens) + row_index for row_index in job.rows]
            tokens += job.tokens
            positions += job.positions
        output = logits[row : row + len(wanted_rows)]
        # llama.cpp gives rows in the tokens' order, each once.
        ordered_rows = wanted_rows
        if any(a >= b for a, b in itertools.pairwise(wanted_rows)):
            ordered_rows = sorted(set(wanted_rows))
            output = torch.empty(len(ordered_rows), self.vocab)
        first_token = copied_rows = 0
        while first_token < len(tokens):
            next_row = ordered_rows[
                copied_rows + CALL_ROWS : copied_rows + CALL_ROWS + 1
            ]  # one too many for a call
            end_token = min(first_token + self.call_tokens, len(tokens), *next_row)
            call_rows = bisect_left(ordered_rows, end_token) - copied_rows
            batch_rows = [
                row_index - first_token
                for row_index in ordered_rows[copied_rows : copied_rows + call_rows]
            ]
            self._fill_batch(
                tokens[first_token:end_token],
                positions[first_token:end_token],
                node_ids[first_token:end_token],
                batch_rows,
            )
            self._decode_batch(busy, len(group))
            if call_rows:
                self._copy_logits(output[copied_rows : copied_rows + call_rows])
            first_token = end_token
            copied_rows += call_rows
        if ordered_rows is not wanted_rows:
            logits[row : row + len(wanted_rows)] = output[
                [bisect_left(ordered_rows, row_index) for row_index in wanted_rows]
            ]
        return row + len(wanted_rows)

    def _copy_logits(self, output: torch.Tensor) -> None:
        """Copies the last call's rows to `output` (k, V), as many as it has."""
        source = self.logits_address(self.context_handle)
        ctypes.memmove(output.data_ptr(), source, 4 * output.numel())

    def _fill_batch(
        self, tokens: list[int], positions: list[int], node_ids: list[list[int]], rows: list[int]
    ) -> None:
        """Writes the batch of one call; `rows`: tokens whose logits are wanted."""
        token_count, batch = len(tokens), self.batch
        batch.n_tokens = token_count
        self.tokens[:token_count] = tokens
        self.positions[:token_count] = positions
        self.wanted[:token_count] = 0
        self.wanted[rows] = 1
        flat_ids = list(itertools.chain.from_iterable(node_ids))
        if len(flat_ids) == token_count:
            self.single_ids[:token_count] = flat_ids
            batch.n_seq_id, batch.seq_id = self.one_each, self.single_each
            return
        all_ids = np.array(flat_ids, np.int32)
        counts = np.array([len(token_ids) for token_ids in node_ids], np.int32)
        first_ids = counts.cumsum(dtype=np.uint64) - counts.astype(np.uint64)
        addresses = int(all_ids.ctypes.data) + 4 * first_ids
        self.held_ids = (all_ids, counts, addresses)  # while the batch points to them
        batch.n_seq_id = ctypes.cast(int(counts.ctypes.data), type(batch.n_seq_id))
        batch.seq_id = ctypes.cast(int(addresses.ctypes.data), type(batch.seq_id))

    def _decode_batch(self, busy: set[Cache], request_count: int) -> None:
        """Makes the call; where there is no room for its rows, makes some and tries again."""
        Log.errors.clear()
        while status_code := self.lib.llama_decode(self.context_handle, self.batch):
            if status_code != NO_ROOM:
                raise RequestFailed(
                    f"{self.name}: llama.cpp could not compute a forward ({Log.reason()})"
                )
            if self.row_count < self.most_rows:
                self._open_memory(min(self.most_rows, 2 * self.row_count), self.id_count)
            elif not self._evict_idle(busy):
                raise PromptTooLong(
                    f"{self.name}: {request_count} requests at once need more than the "
                    f"{self.row_count} "
                    "rows there is memory for; send fewer, or shorter ones"
                )

    @torch.inference_mode()
    def self_test(self) -> None:
        """Tests that a tree below a prompt in pieces gives the rows of its paths. Raises
        Unsupported.
        """
        probe_ids = [(1 + 37 * index) % self.vocab for index in range(7)]
        tree = TokenTree(probe_ids[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        cache, finished = self.cache(), False
        try:
            while not finished:
                job, finished = cache.prepare(Ask(tree), probe_ids, 3)
                reply = self.forward([job])[0]
            cache.drop()
            paths = [
                self.score([*probe_ids, *tree.tokens_to(node)])[0] for node in range(len(tree))
            ]
        except RequestFailed as error:
            raise self._refusal_error(
                f"a tree, and a self-test found that it takes none ({error})"
            ) from error
        for row, path_row in zip(reply.logits, paths, strict=True):
            if not float((row - path_row).abs().max()) <= 0.05 * float(path_row.abs().max()):
                raise self._refusal_error(
                    "a tree to give the rows of its paths, and a self-test found that it does not"
                )

    def __del__(self) -> None:
        context, self.context_handle = self.context_handle, None
        model, self.model_handle = self.model_handle, None
        if context:
            self.lib.llama_free(context)
        if model:
            self.lib.llama_model_free(model)
