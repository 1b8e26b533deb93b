"""What all tests share.

One thread, random numbers and property tests that are the same every time, a cache folder of their
own, a law of counts, and a list of methods whose tests take too long.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from foretell.core.stats import Stats
from foretell.ops.files import cache_folder
from tests.durations import Durations

torch.set_num_threads(1)
# Where real models are kept; only tests marked `real` look there. Workers of xdist inherit it, as
# they do the cache folder below.
USERS = Path(os.environ.setdefault("FORETELL_USERS_CACHE", str(cache_folder())))
# Nothing of the user's is read or changed.
os.environ["FORETELL_CACHE"] = tempfile.mkdtemp(prefix="foretell-tests-")
# Who runs the tests in the background may ignore Ctrl-C, and all processes below would, too.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fixed")

_ended = Stats.note_end


def ended(stats: Stats, tokens: int, elapsed: float) -> None:
    """The law of counts, for every request of every test: what was accepted had been drafted."""
    assert stats.accepted <= stats.drafted, f"{stats.accepted} of {stats.drafted} accepted"
    assert sum(accepted for _, accepted in stats.by_depth) <= stats.drafted
    assert all(accepted <= tested for tested, accepted in stats.by_depth)
    _ended(stats, tokens, elapsed)


Stats.note_end = ended  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def same_conditions() -> Iterator[None]:
    """What a test sets for itself, or draws, the next one does not inherit."""
    torch.manual_seed(0)
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What was collected stays to the end: no `gc.collect` of a test looks through it again."""
    gc.freeze()


def pytest_configure(config: Any) -> None:
    if not hasattr(config, "workerinput"):  # workers of xdist print nothing
        config.pluginmanager.register(Durations())
