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
    """A client's name, the digest of its key, and its limits. None: no limit."""

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

    def find_key(self, given_key: str) -> Key | None:
        """Finds the key that was given. It takes as long whichever it is, or none."""
        key_digest = _hash_key(given_key)
        matched_key = None
        for key in self.keys:
            if hmac.compare_digest(key_digest, key.digest):
                matched_key = key
        return matched_key


def _hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="replace")).digest()


def read_keys(path: Path) -> tuple[Keys, str]:
    """Reads the keys of a file; returns them with a warning where others of this machine can read
    it, else "".

    Raises BadFile, which names the line and never the key.
    """
    try:
        text = path.read_text("utf-8-sig")
        file_mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise BadFile(f"{path}: {reason}; give a file with one API key a line") from error
    keys: list[Key] = []
    for line_number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            keys.append(_parse_key(words, f"{path}, line {line_number}"))
            if keys[-1].digest in [key.digest for key in keys[:-1]]:
                raise BadFile(f"{path}, line {line_number}: the key stands in the file twice")
    if not keys:
        raise BadFile(f"{path}: holds no key; write one a line")
    _check_names(keys, path)
    warning = ""
    if file_mode & (stat.S_IRWXG | stat.S_IRWXO):
        warning = f"{path} can be read by others of this machine: chmod 600 {path}"
    return Keys(keys), warning


def _parse_key(words: Sequence[str], line_place: str) -> Key:
    """Makes the key of a line's words."""
    secret = words[0]
    if len(secret) < SHORTEST:
        raise BadFile(
            f"{line_place}: the key is shorter than {SHORTEST} characters; take a longer one"
        )
    key_digest = _hash_key(secret)
    key_name = f"key-{key_digest.hex()[:8]}"
    limits: dict[str, int] = {}
    for word in words[1:]:
        field, equals, value = word.partition("=")
        if field == "name" and value:
            key_name = value
        elif field in LIMITS and value.isascii() and value.isdecimal() and int(value):
            limits[field] = int(value)
        elif field in LIMITS and equals:
            raise BadFile(f"{line_place}: {field} must be a whole number above 0")
        else:
            known_fields = ", ".join(f"{limit}=..." for limit in ("name", *LIMITS))
            raise BadFile(f"{line_place}: after a key may stand {known_fields}, and nothing else")
    return Key(key_name, key_digest, **limits)


def _check_names(keys: Sequence[Key], path: Path) -> None:
    """Raises BadFile where keys with one name have different limits, since they share them."""
    first_keys: dict[str, Key] = {}
    for key in keys:
        first_key = first_keys.setdefault(key.name, key)
        if any(getattr(key, limit) != getattr(first_key, limit) for limit in LIMITS):
            raise BadFile(f"{path}: the keys named {key.name} have different limits; make them one")
