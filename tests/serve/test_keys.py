"""API keys and the file they stand in."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from foretell.errors import BadFile
from foretell.serve import keys as module
from foretell.serve.keys import read_keys

GOOD = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    text = f"# ours\n\n{GOOD} name=search requests_per_minute=60 concurrent=4\n{OTHER}\n"
    keys, warning = read_keys(written(tmp_path, text))
    assert not warning
    found = keys.find_key(GOOD)
    assert found is not None and found.name == "search"
    assert (found.requests_per_minute, found.tokens_per_minute, found.concurrent) == (60, None, 4)
    unnamed = keys.find_key(OTHER)
    assert unnamed is not None and unnamed.name.startswith("key-")
    for wrong in ("", GOOD[:-1], GOOD + "x", GOOD.upper(), "\ud800"):
        assert keys.find_key(wrong) is None


def test_keys_are_kept_as_digests(tmp_path: Path) -> None:
    keys, _ = read_keys(written(tmp_path, GOOD))
    assert GOOD not in repr(keys.keys)


def test_every_key_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, _ = read_keys(written(tmp_path, f"{GOOD}\n{OTHER}\n"))
    compared = []
    original = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return original(a, b)

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    for given in (GOOD, OTHER, "neither of them"):
        compared.clear()
        keys.find_key(given)
        assert len(compared) == 2


def test_a_file_that_others_can_read_is_told_of(tmp_path: Path) -> None:
    _, warning = read_keys(written(tmp_path, GOOD, 0o644))
    assert "chmod 600" in warning


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# only this\n", "holds no key"),
        ("short", "line 1: the key is shorter"),
        (f"{GOOD}\n{GOOD}", "line 2: the key stands in the file twice"),
        (f"{GOOD} nonsense", "line 1: after a key may stand"),
        (f"{GOOD} color=red", "line 1: after a key may stand"),
        (f"{GOOD} name=", "line 1: after a key may stand"),
        (f"{GOOD} concurrent=0", "concurrent must be a whole number above 0"),
        (f"{GOOD} concurrent=x", "concurrent must be a whole number above 0"),
        (f"{GOOD} name=a concurrent=1\n{OTHER} name=a", "have different limits"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadFile, match=said) as refusal:
        read_keys(written(tmp_path, text))
    assert GOOD not in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="No such file"):
        read_keys(tmp_path / "none")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(BadFile, match="no UTF-8 text"):
        read_keys(binary)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\ufeff" + "k" * 40 + " name=first\n", "utf-8")
    path.chmod(0o600)
    keys, warning = read_keys(path)
    assert keys.find_key("k" * 40) is not None and not warning
