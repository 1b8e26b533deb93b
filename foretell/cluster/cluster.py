"""A Ray cluster to work on: one that is there, or one on this machine for as long as it is needed.

Ray's usage reports and, on a cluster of our own, its dashboard are off. Ray's processes listen on
ports of their own for each other, where Ray wants a token; docs/scaling.md says more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from foretell.errors import BadConfig, Unsupported, first_message_line

KNOCK = 5.0  # seconds for a cluster to take a connection


def check_installed() -> None:
    """Raises Unsupported where Ray is missing."""
    if find_spec("ray") is None:
        raise Unsupported("ray is not installed: pip install 'foretell[ray]'")


@contextmanager
def ray_cluster(address: str | None = None, **options: Any) -> Iterator[None]:
    """Connected to the cluster at this address (`auto`: the one of this machine), or to one that
    begins and ends with the block; `options` of ray.init are for that one.

    Raises BadConfig where there is none at the address.
    """
    check_installed()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    init_options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        ray.init(include_dashboard=False, **init_options, **options)
    else:
        try:
            _knock_at(address)
            ray.init(address, **init_options)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadConfig(
                f"--ray-address {address}: no Ray cluster answers there "
                f"({first_message_line(error)}); start one with `ray start --head`, "
                "or leave the option out"
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock_at(address: str) -> None:
    """Raises OSError or ValueError where nobody listens at host:port: Ray would ask for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), KNOCK).close()
