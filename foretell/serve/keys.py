"""API keys: read from a file, kept as digests, compared in constant time.

A line of the file is a key, and after it what holds for it:

    sk-3f9c...  name=search  requests_per_minute=60  tokens_per_minute=20000  concurrent=4

Empty lines, and those that begin with #, say nothing. Keys with one name share their limits and
what drafters learn.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.errors import BadFile

SHORTEST = 16  # characters of a key: shorter ones can be guessed
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")


@dataclass(frozen=True)
class Key:
    """Who asks, and how much. None: no limit."""

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


class Keys:
    """The keys of a server; without any, everybody may ask."""

    def __init__(self, keys: Sequence[Key] = ()):
        self.keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, given: str) -> Key | None:
        """The key that was given. It takes as long whichever it is, or none."""
        digest = _digest(given)
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="replace")).digest()


def read_keys(path: Path) -> tuple[Keys, str]:
    """The keys of a file, and a warning where others of this machine can read it, else "".

    Raises BadFile, which names the line and never the key.
    """
    try:
        text = path.read_text("utf-8-sig")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8 text"
        raise BadFile(f"{path}: {why}; give a file with one API key a line") from error
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            keys.append(_key(words, f"{path}, line {number}"))
            if keys[-1].digest in [key.digest for key in keys[:-1]]:
                raise BadFile(f"{path}, line {number}: the key stands in the file twice")
    if not keys:
        raise BadFile(f"{path}: holds no key; write one a line")
    _check_names(keys, path)
    warning = ""
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        warning = f"{path} can be read by others of this machine: chmod 600 {path}"
    return Keys(keys), warning


def _key(words: Sequence[str], where: str) -> Key:
    """The key of a line's words."""
    secret = words[0]
    if len(secret) < SHORTEST:
        raise BadFile(f"{where}: the key is shorter than {SHORTEST} characters; take a longer one")
    digest = _digest(secret)
    name = f"key-{digest.hex()[:8]}"
    limits: dict[str, int] = {}
    for word in words[1:]:
        field, equals, value = word.partition("=")
        if field == "name" and value:
            name = value
        elif field in LIMITS and value.isascii() and value.isdecimal() and int(value):
            limits[field] = int(value)
        elif field in LIMITS and equals:
            raise BadFile(f"{where}: {field} must be a whole number above 0")
        else:
            known = ", ".join(f"{limit}=..." for limit in ("name", *LIMITS))
            raise BadFile(f"{where}: after a key may stand {known}, and nothing else")
    return Key(name, digest, **limits)


def _check_names(keys: Sequence[Key], path: Path) -> None:
    """Keys with one name must have the same limits, since they share them."""
    first: dict[str, Key] = {}
    for key in keys:
        other = first.setdefault(key.name, key)
        if any(getattr(key, limit) != getattr(other, limit) for limit in LIMITS):
            raise BadFile(f"{path}: the keys named {key.name} have different limits; make them one")
