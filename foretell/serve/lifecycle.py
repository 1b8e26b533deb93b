"""The life of a server: checks while it is idle, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import TYPE_CHECKING, Any

import uvicorn

from foretell.ops.memory import trim_memory

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.serve.limits import Gate

log = logging.getLogger("foretell.serve")
LINGER = 2.0  # seconds for connections to close when no request is in flight


class Health:
    """Watches whether what the engine keeps is sound, whenever nothing is in flight."""

    def __init__(self, lm: LM, gate: Gate, every: float):
        self.lm = lm
        self.gate = gate
        self.every = every
        self.troubles: list[str] = []
        self.checked: float | None = None  # when, by time.time()

    @property
    def sound(self) -> bool:
        return not self.troubles

    async def watch_idle(self) -> None:
        """Checks for ever."""
        while True:
            await asyncio.sleep(self.every)
            await self.check_now()

    async def check_now(self) -> None:
        """Checks now, unless something is in flight, and gives freed memory back."""
        if self.gate.requests:
            return
        await asyncio.to_thread(trim_memory)
        troubles = await asyncio.to_thread(self.lm.check_integrity)
        if self.gate.requests:  # one came meanwhile, which the check may have met
            return
        self.troubles, self.checked = troubles, time.time()
        for trouble in troubles:
            log.error("integrity check: %s", trouble)

    def describe_health(self) -> dict[str, Any]:
        """The document that `/health` answers with."""
        status = "ok" if self.sound else "damaged"
        if self.gate.draining:
            status = "draining"
        return {
            "status": status,
            "requests": self.gate.requests,
            "integrity": {"checked": self.checked, "troubles": self.troubles},
        }


class Server(uvicorn.Server):
    """The server, which ends in two steps: at the first signal it admits nothing more and waits, at
    the second, or when its time is over, it ends.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, drain: float):
        super().__init__(config)
        self.gate = gate
        self.drain = drain
        self.ends: float | None = None  # when waiting is over, by time.monotonic()

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.gate.draining:
            self.end_now()
            return
        log.warning(
            "%s: no new requests; %d in flight have up to %.0f seconds",
            signal.Signals(sig).name,
            self.gate.requests,
            self.drain,
        )
        self.begin_to_end()

    def begin_to_end(self) -> None:
        """Admits nothing more, and ends when nothing is in flight."""
        self.gate.draining = True
        self.ends = time.monotonic() + self.drain

    def end_now(self) -> None:
        """Ends without waiting; requests in flight are told so."""
        self.gate.draining = True
        self.config.timeout_graceful_shutdown = 0
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Decides whether to end, as uvicorn asks ten times a second."""
        if self.ends is not None and (not self.gate.requests or time.monotonic() > self.ends):
            self.should_exit = True
            if self.gate.requests:
                log.warning("%d requests did not end in time", self.gate.requests)
                self.end_now()
            else:  # bodies may still come: for what is left of the time, and no longer
                remaining_seconds: Any = min(LINGER, max(0.0, self.ends - time.monotonic()))
                self.config.timeout_graceful_shutdown = remaining_seconds
        return await super().on_tick(counter)
