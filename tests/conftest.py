"""What all tests share: one thread, and property tests that draw the same examples every time."""

from __future__ import annotations

import os
import tempfile

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.environ["FORETELL_CACHE"] = tempfile.mkdtemp(
    prefix="foretell-tests-"
)  # nothing of the user's is read or changed
settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fixed")
