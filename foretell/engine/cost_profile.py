"""Measures what a model's forwards cost on this machine, and keeps the numbers in a file.

`profile_model` times forwards of 1 to 64 tokens after a short and a long text. The file lies in
the user's cache folder, one for every model, number format, device, number of threads and version.
`foretell.speculation.costs.Costs` starts from these numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadFile, ForetellWarning
from foretell.ops.files import cache_folder as folder
from foretell.ops.files import write_text
from foretell.speculation.costs import FIRST_SHARE, SIZES, Costs

if TYPE_CHECKING:
    from foretell.cache.cache import Cache
    from foretell.core.model import Model

SCHEMA = "foretell.policy.costs/1"
ROWS = (64, 1024)  # cache rows before the measured tokens
ROUNDS = 9  # of measuring, at most
SECONDS = 0.5  # of measuring, about
QUICK = 0.02  # seconds of a forward that may be repeated at once
REPEATS = 3  # of a quick forward, the best of which counts
CHECKED = 16  # tokens of the largest forward by which kept numbers are checked
CHECK = 0.5  # seconds of checking, after which no other forward begins
SOON = 0.001  # seconds of a forward: what takes less is not checked
OUTDATED = 1.5  # times as long as now: kept numbers that are measured again
CHUNK = 512  # prompt tokens a forward
LONGEST = 3600.0  # seconds; a file that says more of one forward is wrong
Tell = Callable[[int, int], None]  # (forwards done, forwards in all)


def _tell_nothing(done_count: int, total_count: int) -> None:
    pass


# --- measuring


@torch.inference_mode()
def measure_forwards(model: Model, tell: Tell = _tell_nothing) -> dict[int, list[float]]:
    """Medians of a forward's seconds by number of tokens, one for each of ROWS.

    Calls `tell` after every measurement. The configurations take turns, so that a slow second of
    the machine falls on all of them. The first round warms up and does not count, unless forwards
    are so slow that it is the only one.
    """
    lengths = _row_lengths(model)
    sizes = [size for size in SIZES if size + max(lengths) <= model.context]
    seconds: dict[tuple[int, int], list[float]] = {}
    for size in sizes:
        for length in lengths:
            seconds[size, length] = []
    progress = _Progress(ROUNDS * len(seconds), tell)
    # Where all caches share one memory, a long one slows down a forward after a short one, so each
    # length is measured by itself.
    groups = [lengths] if model.layout else [[length] for length in lengths]
    for group in groups:
        limit = SECONDS * len(group) / len(lengths)
        _measure_lengths(model, group, seconds, limit, progress)
    medians: dict[int, list[float]] = {}
    for size in sizes:
        runs = [seconds[size, length] for length in lengths]
        medians[size] = [statistics.median(timings[1:] or timings) for timings in runs]
    return medians


def _row_lengths(model: Model) -> list[int]:
    return [min(length, model.context // 2) for length in ROWS]


class _Progress:
    def __init__(self, total: int, tell: Tell):
        self.done = 0
        self.total = total
        self.tell = tell

    def step(self) -> None:
        self.done += 1
        self.tell(self.done, self.total)


def _measure_lengths(
    model: Model,
    lengths: Sequence[int],
    seconds: dict[tuple[int, int], list[float]],
    limit: float,
    progress: _Progress,
) -> None:
    """Adds to `seconds` all measurements with these numbers of cache rows, for about `limit`
    seconds.
    """
    configurations = [key for key in seconds if key[1] in lengths]
    first_pair = configurations[0]
    start_time = time.perf_counter()
    caches = {length: _filled_cache(model, length) for length in lengths}
    for turn in range(ROUNDS):
        for size, length in configurations:
            seconds[size, length].append(_best_time(model, caches[length], size, length))
            progress.step()
        if time.perf_counter() - start_time > limit:
            if turn:
                break
            # What took so long may have been a backend compiling its graphs: then it is quick
            # from now on.
            repeated_time = _time_forward(model, caches[first_pair[1]], *first_pair)
            if repeated_time > seconds[first_pair][0] / 2:
                break
            start_time = time.perf_counter()
    for cache in caches.values():
        cache.drop()


def _best_time(model: Model, cache: Cache, size: int, length: int) -> float:
    """The seconds of a forward; of a quick one the least of several, since the first one of a size
    may have to fetch the weights from memory.
    """
    timings = [_time_forward(model, cache, size, length)]
    while timings[0] < QUICK and len(timings) < REPEATS:
        timings.append(_time_forward(model, cache, size, length))
    return min(timings)


def _time_forward(model: Model, cache: Cache, size: int, length: int) -> float:
    """Seconds of a forward of a chain of `size` tokens after `length` committed rows."""
    tree = TokenTree(0).chain(i % model.vocab for i in range(1, size))
    ask = Ask(tree, rows=range(size))  # all rows asked for: none of the last forward's is reused
    job, _ = cache.prepare(ask, _blank_text(length), size)
    start_time = time.perf_counter()
    model.forward([job])
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - start_time


def _filled_cache(model: Model, length: int) -> Cache:
    """A cache with `length` committed rows. What they hold does not matter, so that no forward is
    run where rows can exist without one.
    """
    cache = model.cache()
    is_complete = False
    while not is_complete:
        job, is_complete = cache.prepare(Ask(TokenTree(0), rows=[0]), _blank_text(length), CHUNK)
        if model.layout:
            cache.finish()
        else:  # the rows lie where only the model can write them
            model.forward([job])
    cache.commit(_blank_text(length))
    return cache


def _blank_text(length: int) -> list[int]:
    """A text of `length` tokens and the one that follows, the root of the measured tree."""
    return [0] * (length + 1)


# --- what a measurement is valid for


def number_format(model: Model) -> str:
    """The number format of its matrices, by name: int8, int4, bfloat16."""
    packed: str | None = getattr(model, "matrices", None)
    if packed is not None:
        return packed
    return str(model.dtype).removeprefix("torch.")


def model_traits(model: Model) -> dict[str, str]:
    """Facts about model and machine that a measurement is valid for, by name."""
    from foretell import __version__

    hf = getattr(model, "hf", None)
    backend = getattr(getattr(model, "backend", None), "name", "torch")
    if getattr(model, "exact_bits", False):
        backend += ", exact bits"
    size = 0
    if isinstance(hf, torch.nn.Module):
        from foretell.models.decoder.packed import weight_count

        size = weight_count(hf)
    size = getattr(model, "mark", size)  # a model in one file says its name, bytes and date
    on_cuda = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if on_cuda else processor_name()
    matrices = getattr(model, "matrices", None)
    narrow = f"{matrices} and " if matrices else ""
    return {
        "kind": type(hf or model).__name__,
        "executor": backend,
        "size": str(size),
        "vocabulary": str(model.vocab),
        "layers": str(len(model.layout)),
        "shapes": " | ".join(
            map(str, sorted({shape for shape in model.layout if shape is not None}))
        ),
        "dtype": f"{narrow}{model.dtype}",
        "device": device,
        "threads": f"{torch.get_num_threads()} threads",
        "torch": f"torch {torch.__version__}",
        "version": f"foretell {__version__}",
    }


def model_identity(model: Model) -> str:
    """The traits in one line."""
    return " | ".join(model_traits(model).values())


def processor_name() -> str:
    """The processor's name; what the platform module says where no file tells."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- the file


def profile_model(
    model: Model, fresh: bool = False, tell: Tell = _tell_nothing
) -> tuple[Costs, Path]:
    """The costs of this model here, and the file they are kept in.

    They are read from the cache folder, or measured and written there: where there is no usable
    file, where its forwards took much longer than they take now, or if `fresh`. A file that is
    damaged is replaced with a warning; where none can be written the next start measures again.
    """
    identity_text = model_identity(model)
    lengths = _row_lengths(model)
    file_name = hashlib.sha256(f"{identity_text} | {lengths}".encode()).hexdigest()[:24]
    path = folder() / "costs" / f"{file_name}.json"
    seconds = None if fresh else _kept_seconds(path, identity_text, lengths)
    if seconds is None or _is_outdated(model, seconds, lengths[0]):
        seconds = measure_forwards(model, tell)
        document = {"schema": SCHEMA, "about": identity_text, "rows": lengths, "seconds": seconds}
        with contextlib.suppress(BadFile):  # costs the next start a measurement, nothing else
            write_text(path, json.dumps(document, indent=1))
    costs = Costs(model)
    costs.sizes = getattr(getattr(model, "backend", None), "sizes", ())
    for size, (near_seconds, far_seconds) in seconds.items():
        slope = max(0.0, (far_seconds - near_seconds) / max(1, lengths[1] - lengths[0]))
        costs.slope[size] = slope
        costs.seconds[size] = max(near_seconds - slope * lengths[0], FIRST_SHARE * near_seconds)
    return costs, path


def _kept_seconds(
    path: Path, identity_text: str, lengths: list[int]
) -> dict[int, list[float]] | None:
    """Seconds that the file holds; None without a file, or, with a warning, for a bad one."""
    try:
        return check_costs(json.loads(path.read_text("utf-8")), identity_text, lengths)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        message = str(error) if type(error) is ValueError else "it cannot be read"
        warnings.warn(f"{path}: {message}; the costs are measured again", ForetellWarning, 3)
        return None


@torch.inference_mode()
def _is_outdated(model: Model, seconds: dict[int, list[float]], length: int) -> bool:
    """Whether small forwards are much quicker now than they were when the file was written: then
    something else kept the machine busy. That they are slower now says nothing about the file.
    """
    cache = _filled_cache(model, length)
    try:
        start_time = time.perf_counter()
        for size, (kept_seconds, *_) in seconds.items():
            if size > CHECKED:
                return False
            for _ in range(REPEATS):
                if (
                    kept_seconds > SOON
                    and _time_forward(model, cache, size, length) * OUTDATED < kept_seconds
                ):
                    return True
                # The file has no say in how long the check takes: it may be wrong by any factor.
                if time.perf_counter() - start_time > CHECK:
                    return False
        return False
    finally:
        cache.drop()


def check_costs(document: Any, identity_text: str, lengths: list[int]) -> dict[int, list[float]]:
    """The seconds of a document that `profile_model` has written, each one tested.

    Raises ValueError, which says what is wrong.
    """
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
        raise ValueError(f"is no profile of schema {SCHEMA}")
    if document.get("about") != identity_text or document.get("rows") != lengths:
        raise ValueError("is of another model or machine than its name says")
    entries = document.get("seconds")
    if not isinstance(entries, Mapping) or not entries:
        raise ValueError("has no seconds")
    seconds: dict[int, list[float]] = {}
    for name, pair in entries.items():
        size = int(name) if str(name).isdecimal() else 0
        if size not in SIZES or size <= max(seconds, default=0):
            raise ValueError(f"its sizes must be some of {SIZES}, ascending, not {name!r}")
        if not isinstance(pair, list) or len(pair) != len(lengths):
            raise ValueError(f"size {size} must have {len(lengths)} numbers")
        for value in pair:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value <= LONGEST:  # NaN is neither
                raise ValueError(f"size {size}: {value!r} is no time of a forward")
        seconds[size] = [float(value) for value in pair]
    return seconds
