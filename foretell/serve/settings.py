"""Settings of a server: what it allows, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretell.serve.keys import Keys
from foretell.serve.translate import Bounds

MEGABYTE = 2**20


@dataclass(frozen=True)
class Settings:
    """The settings of a server. Times are in seconds."""

    keys: Keys = field(default_factory=Keys)
    bounds: Bounds = field(default_factory=lambda: Bounds(timeout=600.0))  # of each request
    running: int = 32  # answers that are computed at once; others wait
    memory: int | None = None  # bytes of cache rows of running answers; None: by the machine's
    budget: int | None = None  # bytes of everything, see LM.limit; None: no limit
    prefixes: int = 512 * MEGABYTE  # bytes of rows kept for texts that begin alike
    learnt: int = 1024 * MEGABYTE  # bytes of what drafters have learnt of all clients
    between_tokens: float | None = None  # of a text, while long prompts are taken in
    waiting: int = 128  # answers that may wait; more are told to come back
    share_between_keys: bool = False  # what drafters learn, and prefixes that are known
    body: int = 8 * MEGABYTE  # bytes of a request
    patience: float = 30.0  # for a body to come, and for a reader to take the next chunk
    drain: float = 30.0  # for requests in flight, once the server is to end
    check_every: float = 60.0  # between two checks of what is kept
    origins: tuple[str, ...] = ()  # other sites whose pages may ask
    hosts: tuple[str, ...] = ()  # names by which clients may call the server; empty: any
    log_prompts: bool = False
