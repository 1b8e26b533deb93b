"""A GGUF file through llama.cpp: its kernels and number formats, its memory for the rows.

llama.cpp takes no mask: a token sees the rows that carry the first of its own sequence ids, up to
its position. So a chain has one id, and of a tree every way from the root to a leaf has one, its
lane; a node carries the ids of all the leaves below it. Ids share rows, so that a copy costs
bookkeeping alone. What was accepted stays under the id of its lane, which becomes the branch's; the
other lanes keep the committed rows and catch up when they are needed again.

Rows and ids are few and all requests share them. Both are doubled when they run short, then idle
branches lose theirs and compute them again when it is their turn.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import io
import itertools
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretell.core.cache import Cache
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply
from foretell.errors import BadModel, PromptTooLong, RequestFailed, Unsupported
from foretell.memory.job import Job
from foretell.runtimes.vocabulary import Vocabulary

CURE = "pip install 'foretell[gguf]'"
ROWS, LANES, MOST = 4096, 64, 256  # rows and ids to begin with; llama.cpp's limit of ids
MEMORY = 4 << 30  # bytes that rows may take
REQUESTS = 16  # of the longest context, whose rows may be kept at once if that memory holds them
BATCH, OUTPUTS = 2048, 256  # tokens and rows of logits of one call
PART = 128  # tokens that it computes at once, which its working memory is for
PROVEN = frozenset({"llama", "qwen2", "qwen3"})  # compared with transformers in the project's tests
FORMATS = {
    0: torch.float32,
    1: torch.float16,
    32: torch.bfloat16,
}  # llama.cpp's file types; others: float16, as rows
F32 = 0  # ggml's number for rows in float32


class _Log:
    """llama.cpp's messages, which it would print: of the last call that failed, the errors."""

    errors: list[str] = []  # noqa: RUF012 - one for the process, as the callback is

    @classmethod
    def line(cls) -> str:
        return next((e.partition(": ")[2] or e for e in cls.errors if e), "it gives no reason")


_lib: Any = None
_keep: list[Any] = []  # callbacks must not be collected


def library() -> Any:
    """llama.cpp's functions; made silent the first time. Raises Unsupported where the package is
    missing.
    """
    global _lib
    if _lib is None:
        try:
            import llama_cpp._utils as inner
            import llama_cpp.llama_cpp as lib
        except (
            ImportError,
            OSError,
            RuntimeError,
        ) as error:  # not installed, or not for this machine
            raise Unsupported.missing(
                "foretell.load", "a .gguf file", f"the package llama-cpp-python ({error})", CURE
            ) from error

        for file in vars(inner).values():
            if isinstance(
                file, io.IOBase
            ):  # it leaves two open, which Python would complain of at the end
                atexit.register(file.close)

        def note(level: int, text: bytes, _: Any) -> None:
            if level == 4:  # an error
                _Log.errors.append(text.decode("utf-8", "replace").strip())

        _keep.append(lib.llama_log_callback(note))
        lib.llama_log_set(_keep[0], None)
        lib.llama_backend_init()
        _lib = lib
    return _lib


class Lane:
    """A sequence id: it carries the first `base` committed rows and then the scratch nodes of
    `path`, root to leaf.
    """

    __slots__ = ("base", "id", "path")

    def __init__(self, id: int):
        self.id, self.base, self.path = id, 0, list[int]()


class Branch(Cache):
    """A cache whose rows lie in llama.cpp's memory, under the ids of its lanes; lane 0 always has
    what is committed.
    """

    def __init__(self, model: GGUF):
        super().__init__((), model.dtype, model.device)
        self.model = model
        self.lanes: list[Lane] = []
        self.used = 0  # the model's count of forwards at the last one
        self.open = False  # a change of the memory was begun; if it is found so, it was interrupted
        model.branches.add(self)

    def fork(self) -> Branch:
        """A copy that shares the committed rows, and the scratch rows where they are one chain."""
        twin = copy.copy(self)
        twin.lanes, twin.tokens, twin.parents, twin.branch = [], [], [], 0
        self.model.branches.add(twin)
        if not self.lanes or self.open:
            twin.length = 0
            return twin
        first = self.lanes[0]
        chain = len(first.path) == len(self.tokens) == len(self.parents)
        twin.lanes = [Lane(self.model.reserve(1, {self}, self)[0])]
        twin.lanes[0].base = self.length
        self.model.share(first.id, twin.lanes[0].id, 0, self.length + len(first.path) * chain)
        if chain:
            twin.tokens, twin.parents, twin.branch = [*self.tokens], [*self.parents], self.branch
            twin.lanes[0].path = [*first.path]
        return twin

    def drop(self) -> None:
        lanes, self.lanes = self.lanes, []
        for lane in lanes:
            self.model.release(lane.id)

    def forget(self) -> None:
        """Gives up all rows; they are computed again when they are asked for."""
        self.drop()
        self.length, self.tokens, self.parents, self.branch, self.open = 0, [], [], 0, False

    def __del__(self) -> None:
        if getattr(self, "lanes", None):
            self.drop()

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        if self.open:
            self.forget()
        return super().prepare(ask, tokens, chunk)

    def _keep(self, keep: Sequence[int]) -> None:
        self.open = True
        if keep:
            depth = len(keep) - 1
            lanes = self.lanes
            best = next(
                i
                for i, lane in enumerate(lanes)
                if len(lane.path) > depth and lane.path[depth] == keep[-1]
            )
            lanes[0], lanes[best] = lanes[best], lanes[0]
        for lane in self.lanes:
            if path := lane.path:
                same = (
                    len(keep)
                    if lane is self.lanes[0]
                    else next(
                        (i for i, (a, b) in enumerate(zip(path, keep, strict=False)) if a != b),
                        min(len(path), len(keep)),
                    )
                )
                if len(path) > same:
                    self.model.cut(lane.id, self.length + same)
                lane.base, lane.path = self.length + same, []
        self.open = False

    def wants(self, parents: Sequence[int], shared: int) -> int:
        """How many lanes the new nodes need beyond those that wait idle, from `shared` on."""
        if not self.lanes:
            return 1 + _forks(parents, shared, (-1,))
        used = [lane.path[: bisect_left(lane.path, shared)] for lane in self.lanes]
        tails = [path[-1] if path else -1 for i, path in enumerate(used) if path or not i]
        return max(0, _forks(parents, shared, tails) - sum(not path for path in used[1:]))

    def place(
        self, parents: Sequence[int], shared: int, fresh: list[int], chain: bool
    ) -> list[list[int]]:
        """The ids of each new node (from `shared` on); the lanes are made to carry what their nodes
        have to see.

        `fresh`: as many ids as `wants` says; `chain`: no node has two children. On return `open` is
        set, which whoever runs the forward clears.
        """
        self.open, length = True, self.length
        self.lanes += [Lane(id) for id in fresh]
        if chain and len(self.lanes) == 1 and len(self.lanes[0].path) == shared:
            self.lanes[0].path += range(shared, len(parents))
            return [[self.lanes[0].id]] * (len(parents) - shared)
        first: dict[int, Lane] = {}  # of each node that is there, a lane that carries it
        tails: dict[int, Lane] = {}  # the lane that ends at this node
        idle: list[Lane] = []
        for i, lane in enumerate(self.lanes):
            if lane.path and lane.path[-1] >= shared:
                there = bisect_left(lane.path, shared)
                self.model.cut(lane.id, length + there)
                lane.base, lane.path = length, lane.path[:there]
            if lane.path or not i:
                tails.setdefault(lane.path[-1] if lane.path else -1, lane)
                for node in lane.path:
                    first.setdefault(node, lane)
            else:
                idle.append(lane)
        ids: list[list[int]] = []
        for node in range(shared, len(parents)):
            parent = parents[node]
            lane_ = tails.pop(parent, None)
            if lane_ is None:
                lane_ = idle.pop()
                source = first.get(parent, self.lanes[0])
                path = source.path[: bisect_left(source.path, parent) + 1] if parent >= 0 else []
                there = bisect_left(path, shared)
                if lane_.base < length + there:
                    self.model.share(source.id, lane_.id, lane_.base, length + there)
                for above in path[there:]:
                    ids[above - shared].append(lane_.id)
                lane_.base, lane_.path = length, path
            lane_.path.append(node)
            tails[node] = first[node] = lane_
            ids.append([lane_.id])
        return ids


def _forks(parents: Sequence[int], shared: int, tails: Iterable[int]) -> int:
    """How many of the nodes from `shared` on cannot go on where a lane ends."""
    ends, count = set(tails), 0
    for node in range(shared, len(parents)):
        if parents[node] in ends:
            ends.discard(parents[node])
        else:
            count += 1
        ends.add(node)
    return count


class Full(Exception):
    """No room for the ids or rows of a forward, though nothing idle is left to give up."""


class GGUF(Model):
    """A model in a .gguf file, on the CPU. `dtype` is what its numbers are good for: that of
    weights or of its rows.

    Raises BadModel for a file that llama.cpp cannot read, Unsupported for a kind that trees cannot
    run on.
    """

    device = torch.device("cpu")
    layout = ()
    ctx: Any = None
    file: Any = None

    def __init__(self, path: Path):
        _check(path)
        self.lib, self.branches = library(), weakref.WeakSet[Branch]()
        self.path, lib = path, self.lib
        self.free: list[int] = []
        self.lanes = 0  # ids in all
        self.file = _open(lib, path, vocab_only=False)
        self.words = Vocabulary(lib, self.file)
        self.vocab, self.weight_bytes = len(self.words), int(lib.llama_model_size(self.file))
        about = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.file, about, len(about))
        self.name = f"{path.name} ({about.value.decode('utf-8', 'replace')})"
        self.family = self._meta("general.architecture") or "unknown"
        for kind in ("is_recurrent", "is_hybrid", "has_encoder", "is_diffusion"):
            if getattr(lib, f"llama_model_{kind}")(self.file):
                raise self._refuse(
                    f"a decoder with attention in every layer, which this one is not ({kind})"
                )
        stat = path.stat()
        # what tells this model from another
        self.mark = f"{path.name} {stat.st_size} {stat.st_mtime_ns}"
        self.dtype = FORMATS.get(int(lib.llama_model_ftype(self.file)), torch.float16)
        self._size()
        self.threads = torch.get_num_threads()
        self._reopen(min(ROWS, self.most), LANES)
        self._arrays()
        if self.family not in PROVEN:
            self.self_test()

    def _refuse(self, capability: str) -> Unsupported:
        return Unsupported.missing(
            "foretell",
            f"{self.name}, family {self.family}",
            capability,
            "use llama.cpp itself for it",
        )

    def _meta(self, key: str) -> str:
        """A value of the file's header as text; empty where it has none."""
        out = ctypes.create_string_buffer(512)
        size = self.lib.llama_model_meta_val_str(self.file, key.encode(), out, len(out))
        return out.value.decode("utf-8", "replace") if size >= 0 else ""

    def _size(self) -> None:
        """The longest context, and how many rows there may be."""
        lib, file = self.lib, self.file
        heads = lib.llama_model_n_head_kv(file)
        width = lib.llama_model_n_embd(file) // max(1, lib.llama_model_n_head(file))
        sides = [
            int(self._meta(f"{self.family}.attention.{side}_length") or width)
            for side in ("key", "value")
        ]
        row = (
            lib.llama_model_n_layer(file)
            * heads
            * sum(sides)
            * (4 if self.dtype == torch.float32 else 2)
        )
        trained, spare, room = (
            lib.llama_model_n_ctx_train(file),
            1024,
            max(2048, MEMORY // max(1, row)),
        )
        original = self._meta(f"{self.family}.rope.scaling.original_context_length")
        if original and self._meta(f"{self.family}.rope.scaling.type") not in ("yarn", "linear"):
            room = trained = min(
                trained, int(original)
            )  # beyond it the rotation depends on how many rows there are
            spare = min(spare, room // 2)
        self.context = min(trained, room - spare)
        self.most = min(room, max(self.context + spare, REQUESTS * self.context))

    def _arrays(self) -> None:
        """What a call hands over, written through numpy."""
        self.tokens, self.places, self.seqs = (np.zeros(BATCH, np.int32) for _ in range(3))
        self.ones, self.wanted = np.ones(BATCH, np.int32), np.zeros(BATCH, np.int8)
        self.each = self.seqs.ctypes.data + 4 * np.arange(
            BATCH, dtype=np.uint64
        )  # where the one id of a token lies
        fields = dict(self.lib.llama_batch._fields_)
        self.at = {
            name: ctypes.cast(int(array.ctypes.data), fields[field])
            for name, field, array in (
                ("tokens", "token", self.tokens),
                ("places", "pos", self.places),
                ("ones", "n_seq_id", self.ones),
                ("each", "seq_id", self.each),
                ("wanted", "logits", self.wanted),
            )
        }
        self.batch = self.lib.llama_batch(
            0,
            self.at["tokens"],
            None,
            self.at["places"],
            self.at["ones"],
            self.at["each"],
            self.at["wanted"],
        )
        # An address as a number: the binding's own prototype makes an object of it each time.
        self.logits_at = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(
            ("llama_get_logits", self.lib._lib)
        )

    # --- ids and rows

    def _reopen(self, rows: int, lanes: int) -> None:
        """A memory of this size with all that the old one holds."""
        lib, old = self.lib, self.ctx
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified, options.swa_full = (
            rows,
            lanes,
            True,
            True,
        )
        options.n_batch, options.n_ubatch, options.n_outputs_max = BATCH, PART, OUTPUTS
        # Its flash attention on a CPU takes up to twice as long for a tree behind a long text, and
        # rounds more.
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.n_threads = options.n_threads_batch = self.threads
        options.no_perf = True
        if self.dtype == torch.float32:
            options.type_k = options.type_v = F32
        new = lib.llama_init_from_model(self.file, options)
        if not new:
            raise BadModel(
                f"{self.name}: llama.cpp has no room for {rows} rows ({_Log.line()}); "
                "free memory or take a smaller model"
            )
        if old:
            size = lib.llama_state_get_size(old)
            state = (ctypes.c_uint8 * size)()
            if (
                lib.llama_state_get_data(old, state, size) != size
                or lib.llama_state_set_data(new, state, size) != size
            ):
                lib.llama_free(new)
                raise BadModel(f"{self.name}: llama.cpp cannot move its rows ({_Log.line()})")
            lib.llama_free(old)
        self.ctx, self.memory = new, lib.llama_get_memory(new)
        self.free += range(self.lanes, lanes)
        self.rows, self.lanes = int(lib.llama_n_ctx(new)), lanes
        self.once = min(
            BATCH, int(lib.llama_n_batch(new))
        )  # tokens of a call; more would end the process

    def cut(self, id: int, start: int) -> None:
        self.lib.llama_memory_seq_rm(self.memory, id, start, -1)

    def share(self, source: int, id: int, start: int, end: int) -> None:
        self.lib.llama_memory_seq_cp(self.memory, source, id, start, end)

    def release(self, id: int) -> None:
        if self.ctx:
            self.cut(id, 0)
            self.free.append(id)

    def reserve(self, count: int, busy: set[Cache], by: Branch) -> list[int]:
        """This many ids that carry nothing, for `by`, whose idle lanes stay its own. Raises
        Full.
        """
        while len(self.free) < count:
            if self.lanes < MOST:
                self._reopen(self.rows, min(MOST, 2 * self.lanes))
            elif not (self._idle_lanes(by) or self._evict(busy)):
                raise Full
        return [self.free.pop() for _ in range(count)]

    def _idle_lanes(self, by: Branch) -> bool:
        """Takes back the ids that wait for a next tree."""
        before = len(self.free)
        for branch in self.branches:
            for lane in branch.lanes[1:]:
                if not (lane.path or branch.open or branch is by):
                    branch.lanes.remove(lane)
                    self.release(lane.id)
        return len(self.free) > before

    def _evict(self, busy: set[Cache]) -> bool:
        """Makes the branch that waits longest forget its rows; False if none can."""
        waiting = [b for b in self.branches if b.lanes and b not in busy]
        if waiting:
            min(waiting, key=lambda b: b.used).forget()
        return bool(waiting)

    def cache(self) -> Branch:
        return Branch(self)

    # --- the forward

    def forward(self, jobs: Sequence[Job], taps: Sequence[int] = ()) -> list[Reply]:
        """One call for all jobs where memory and ids suffice, else as few as it takes."""
        self.calls, self.width = self.calls + 1, sum(len(job.tokens) for job in jobs)
        if self.threads != (threads := self.asked or torch.get_num_threads()):
            self.threads = threads
            self.lib.llama_set_n_threads(self.ctx, self.threads, self.threads)
        if len(jobs) == 1 and len(jobs[0].tokens) == 1 and jobs[0].rows and self._step(jobs[0]):
            logits = torch.empty(1, self.vocab)
            self._decode({jobs[0].cache}, 1)
            ctypes.memmove(logits.data_ptr(), self.logits_at(self.ctx), 4 * self.vocab)
            self._finish(jobs)
            return [Reply(logits, {}, [jobs[0].first])]
        logits = torch.empty(sum(len(job.rows) for job in jobs), self.vocab)
        busy = {job.cache for job in jobs}
        todo, row = [*jobs], 0
        while todo:
            group, ids = self._group(todo, busy)
            row = self._run(group, ids, logits, row, busy)
            self._finish(group)
            busy -= {job.cache for job in group}
            del todo[: len(group)]
        replies, row = [], 0
        for job in jobs:
            replies.append(
                Reply(logits[row : row + len(job.rows)], {}, [r + job.first for r in job.rows])
            )
            row += len(job.rows)
        return replies

    def _finish(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            branch: Any = job.cache
            branch.finish()
            branch.open, branch.used = False, self.calls

    def _step(self, job: Job) -> bool:
        """The batch of one token behind the rows of lane 0, all that plain decoding asks; False if
        it is more.
        """
        branch: Any = job.cache
        if (
            not branch.lanes
            or branch.lanes[0].path
            or len(branch.lanes) > 1
            or job.start != branch.length
        ):
            return False
        branch.open = True
        branch.lanes[0].path.append(0)
        self.tokens[0], self.places[0], self.wanted[0], self.seqs[0] = (
            *job.tokens,
            *job.columns,
            1,
            branch.lanes[0].id,
        )
        self.batch.n_tokens, self.batch.n_seq_id, self.batch.seq_id = (
            1,
            self.at["ones"],
            self.at["each"],
        )
        return True

    def _group(self, todo: Sequence[Job], busy: set[Cache]) -> tuple[list[Job], list[list[int]]]:
        """The first of these jobs for which ids suffice, and the ids of each of their tokens."""
        group, ids = list[Job](), list[list[int]]()
        for job in todo:
            branch: Any = job.cache
            parents, shared = branch.next[1], job.start - branch.length
            try:
                fresh = self.reserve(branch.wants(parents, shared), busy, branch)
            except Full:
                if group:
                    break
                raise self._refuse(
                    f"trees of fewer than {MOST} leaves, which is how many sequences llama.cpp tells "
                    "apart"
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
        tokens, places, asked, low = list[int](), list[int](), list[int](), 0
        for job in group:
            tokens += job.tokens
            places += job.positions
            asked += [low + r for r in job.rows]
            low += len(job.tokens)
        order = sorted(set(asked)) if any(a >= b for a, b in itertools.pairwise(asked)) else asked
        out = (
            logits[row : row + len(asked)]
            if order is asked
            else torch.empty(len(order), self.vocab)
        )
        start = done = 0
        while start < len(tokens):
            end = min(start + self.once, len(tokens), *order[done + OUTPUTS : done + OUTPUTS + 1])
            count = bisect_left(order, end) - done
            wanted = [r - start for r in order[done : done + count]]
            self._fill(tokens[start:end], places[start:end], ids[start:end], wanted)
            self._decode(busy, len(group))
            if count:
                ctypes.memmove(
                    out[done].data_ptr(), self.logits_at(self.ctx), 4 * count * self.vocab
                )
            start, done = end, done + count
        if order is not asked:
            logits[row : row + len(asked)] = out[[bisect_left(order, r) for r in asked]]
        return row + len(asked)

    def _fill(
        self, tokens: list[int], places: list[int], ids: list[list[int]], wanted: list[int]
    ) -> None:
        """Writes the batch of one call."""
        n, batch = len(tokens), self.batch
        batch.n_tokens = n
        self.tokens[:n], self.places[:n] = tokens, places
        self.wanted[:n] = 0
        self.wanted[wanted] = 1
        counts = [len(own) for own in ids]
        flat = list(itertools.chain.from_iterable(ids))
        if len(flat) == n:
            self.seqs[:n] = flat
            batch.n_seq_id, batch.seq_id = self.at["ones"], self.at["each"]
            return
        self.held = [
            np.array(a, t) for a, t in ((flat, np.int32), (counts, np.int32), (counts, np.uint64))
        ]
        sets, sizes, ends = self.held
        ends[:] = int(sets.ctypes.data) + 4 * (
            ends.cumsum() - ends
        )  # where the ids of each token begin
        batch.n_seq_id = ctypes.cast(int(sizes.ctypes.data), type(batch.n_seq_id))
        batch.seq_id = ctypes.cast(int(ends.ctypes.data), type(batch.seq_id))

    def _decode(self, busy: set[Cache], requests: int) -> None:
        """The call; makes room and tries again where there is none."""
        _Log.errors.clear()
        while code := self.lib.llama_decode(self.ctx, self.batch):
            if code != 1:
                raise RequestFailed(
                    f"{self.name}: llama.cpp could not compute a forward ({_Log.line()})"
                )
            if self.rows < self.most:
                self._reopen(min(self.most, 2 * self.rows), self.lanes)
            elif not self._evict(busy):
                raise PromptTooLong(
                    f"{self.name}: {requests} requests at once need more than the {self.rows} rows "
                    "there is memory for; send fewer, or shorter ones"
                )

    @torch.inference_mode()
    def self_test(self) -> None:
        """A tree behind a prompt in pieces must give the rows of its paths."""
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
        ctx, file, self.ctx, self.file = self.ctx, self.file, None, None
        if ctx:
            self.lib.llama_free(ctx)
        if file:
            self.lib.llama_model_free(file)


def _check(path: Path) -> None:
    """Raises BadModel where there is no file, or another kind of file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise BadModel(f"{path}: {reason}; give the path of a .gguf file") from error
    if magic != b"GGUF":
        raise BadModel(f"{path}: is no GGUF file, whatever its name says; fetch it again")


def _open(lib: Any, path: Path, vocab_only: bool) -> Any:
    """A handle of the file's model. Raises BadModel."""
    options = lib.llama_model_default_params()
    options.vocab_only, options.n_gpu_layers = vocab_only, 0
    _Log.errors.clear()
    handle = lib.llama_model_load_from_file(str(path).encode(), options)
    if not handle:
        raise BadModel(
            f"{path}: llama.cpp cannot read it ({_Log.line()}); fetch it again, or use a newer "
            "llama-cpp-python if the family is new"
        )
    return handle


def vocabulary(path: Path) -> Vocabulary:
    """The tokenizer of a file alone, without its weights. Raises BadModel or Unsupported."""
    _check(path)
    lib = library()
    handle = _open(lib, path, vocab_only=True)
    words = Vocabulary(lib, handle)
    words.close = weakref.finalize(words, lib.llama_model_free, handle)
    return words
