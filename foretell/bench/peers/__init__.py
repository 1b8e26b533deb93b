"""Other decoders that `foretell bench` measures beside its own, one file a peer, found by the
file's name.

A file has `contenders(place)`, which returns a Peer for each way in which that library decodes.
What is not installed raises Unsupported there, with the cure. A peer is set up as its own
documentation says; `about` puts that in words, and the report prints it. Where its number format is
not the one asked for, the name says so. A peer is called by its file's name with a dot for an
underscore: llama.cpp is in llama_cpp.py.

A library whose packages do not go with ours runs in a process of its own: see _worker.py (our side
of it), _process.py (its side), _environment.py and _conversion.py.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foretell.errors import UnknownMethod


@dataclass
class Run:
    """A generation. `counts[i]` tokens came out `times[i]` seconds after the call; the first of
    them ends prefill.
    """

    tokens: list[int]
    times: list[float]
    counts: list[int]


@dataclass(frozen=True)
class Place:
    """Subject and place of a measurement: folders or hub ids of the model and its draft, number
    format and device by name.

    `dtype` may also be int8. `eos`: ids that end a text.
    """

    model: str
    draft: str | None
    dtype: str
    device: str
    threads: int = 1
    eos: tuple[int, ...] = ()


class Peer(Protocol):
    """A way of decoding, ready to run."""

    name: str
    about: str

    def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run: ...


def peer_names() -> list[str]:
    return sorted(path.stem.replace("_", ".") for path in Path(__file__).parent.glob("[!_]*.py"))


def file_stem(name: str) -> str:
    """The name of a peer's files."""
    return name.replace(".", "_")


def check_peer(name: str) -> None:
    """Raises UnknownMethod where there is no such peer."""
    if name not in peer_names():
        raise UnknownMethod.suggest_names("peer", name, peer_names())


def contenders(name: str, place: Place) -> list[Peer]:
    """The ways of decoding of one library. Raises UnknownMethod, or Unsupported where it cannot run
    here.
    """
    check_peer(name)
    peers_found: list[Peer] = importlib.import_module(
        f"foretell.bench.peers.{file_stem(name)}"
    ).contenders(place)
    return peers_found
