"""The datastore: its order, what it finds, what it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from foretell.drafters.lookup import datastore
from foretell.drafters.lookup.datastore import (
    build_datastore,
    content_checksum,
    load_datastore,
    sort_suffixes,
    tokenizer_mark,
)
from foretell.errors import BadConfig, BadFile
from tests.files import full_disk
from tests.laws import spell

texts = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=6).filter(any)
TEXTS = [[0, 1, 2, 0, 1], [2, 0, 1, 1], [], [0, 1]]


@given(
    st.lists(st.sampled_from([0, 1, 2, 7, 70_000]), min_size=1, max_size=60),
    st.sampled_from([1, 2, 4, 8, 64]),
    st.booleans(),
)
def test_suffixes_are_ordered_by_their_first_tokens_and_then_by_place(
    tokens: list[int], depth: int, wide: bool
) -> None:
    tokens = tokens if wide else [t % 3 for t in tokens]
    want = sorted(range(len(tokens)), key=lambda i: (tokens[i : i + depth], i))
    assert sort_suffixes(np.array(tokens, np.uint32), depth).tolist() == want


def test_long_repetitions_are_ordered_to_the_depth() -> None:
    for tokens in ([3] * 500, [1, 2] * 250, [*range(100), 9] * 5):
        want = sorted(range(len(tokens)), key=lambda i: (tokens[i : i + datastore.DEPTH], i))
        assert sort_suffixes(np.array(tokens, np.uint16)).tolist() == want


def test_progress_of_the_order_begins_and_ends() -> None:
    said: list[tuple[str, int, int | None]] = []
    for top, rounds in (
        (1, 2),
        (50_000, 5),
        (60_000, 6),
        (2**32 - 2, 7),
    ):  # ever fewer tokens fit into one number
        said.clear()
        tokens = [top, 0, top] * 200
        got = sort_suffixes(np.array(tokens, np.uint32), tell=lambda *args: said.append(args))
        assert got.tolist() == sorted(
            range(600), key=lambda i: (tokens[i : i + datastore.DEPTH], i)
        )
        assert said == [("sorting", done, rounds) for done in range(rounds + 1)]


@given(texts, st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_finds_every_place_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], pattern: list[int]
) -> None:
    store = build_datastore(tmp_path_factory.mktemp("d") / "x.safetensors", documents)
    vocab = 1 + max(t for text in documents for t in text)
    tokens = [t for text in documents if text for t in [*text, vocab]]
    assert (
        store.tokens.tolist() == tokens
        and store.vocab == vocab
        and store.documents == sum(map(bool, documents))
    )
    inside = all(t < vocab for t in pattern)
    want = [i for i in range(len(tokens)) if inside and tokens[i : i + len(pattern)] == pattern]
    low, high = store.find_ranks(pattern)
    assert sorted(store.places(low, high, 999).tolist()) == want
    few = store.places(low, high, 2)
    assert (
        few.dtype == np.int64 and len(few) == min(2, len(want)) and set(few.tolist()) <= set(want)
    )


def test_of_many_places_those_in_equal_distances_are_taken(tmp_path: Path) -> None:
    store = build_datastore(tmp_path / "x.safetensors", [[0, i % 5] for i in range(100)])
    low, high = store.find_ranks([0])
    assert high - low == 104 - 4 + 20 and len(store.places(low, high, 10)) == 10
    following = store.tokens[store.places(low, high, 12) + 1].tolist()
    assert following == sorted(following) and set(following) == {0, 1, 2, 3, 4, store.vocab}


def test_the_largest_ids_have_room(tmp_path: Path) -> None:
    for top, kind in ((65_534, np.uint16), (65_535, np.uint32), (200_000, np.uint32)):
        store = build_datastore(tmp_path / "x.safetensors", [[top, 1], [1, top]])
        assert store.tokens.dtype == kind and store.tokens.tolist() == [
            top,
            1,
            top + 1,
            1,
            top,
            top + 1,
        ]
        assert store.find_ranks([top, 1]) != (0, 0) and store.find_ranks([top + 1, 1]) == (0, 0)
        assert store.nbytes == 6 * (4 + np.dtype(kind).itemsize)


def test_a_file_in_use_is_read_once_and_a_new_one_again(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    store = build_datastore(path, TEXTS)
    assert (
        load_datastore(path) is store
        and load_datastore(str(path)) is store
        and copy.deepcopy(store) is store
    )
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 1
    other = build_datastore(path, [[1, 1, 1]])
    assert load_datastore(path) is other and store.tokens.tolist()[:3] == [0, 1, 2], (
        "the old file stays readable"
    )


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> object:
        yield [1, 2]
        raise KeyboardInterrupt

    path = tmp_path / "new" / "x.safetensors"
    for old in (False, True):
        with pytest.raises(KeyboardInterrupt):
            build_datastore(path, broken())  # type: ignore[arg-type]
        assert [p.name for p in path.parent.iterdir()] == ([path.name] if old else [])
        build_datastore(path, TEXTS)
    assert load_datastore(path).documents == 3


def test_others_may_read_it_as_they_may_any_file(tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    build_datastore(tmp_path / "x.safetensors", TEXTS)
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_nothing_to_index_and_no_place_for_it_are_told(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no tokens"):
        build_datastore(tmp_path / "x.safetensors", [[], []])
    with pytest.raises(BadConfig, match="is a folder"):
        build_datastore(tmp_path, TEXTS)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(BadFile, match="cannot be written"):
        build_datastore(tmp_path / "file" / "x.safetensors", TEXTS)


def test_any_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    right = build_datastore(path, TEXTS, spell)
    arrays = (
        right.tokens.tolist(),
        right.suffixes.tolist(),
        right.vocab,
        right.mark,
        right.documents,
    )
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        path.unlink()
        path.write_bytes(damaged)
        try:
            store = load_datastore(path)
        except BadFile as error:
            assert str(path) in str(error) and "build it again with foretell datastore" in str(
                error
            )
            refused += 1
        else:  # a space of the header's padding that became another white space
            assert arrays == (
                store.tokens.tolist(),
                store.suffixes.tolist(),
                store.vocab,
                store.mark,
                store.documents,
            )
    assert refused >= len(content) - 8


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    build_datastore(path, TEXTS)
    content = path.read_bytes()
    for size in (*range(0, len(content), 7), len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(BadFile, match="damaged, cut off"):
            load_datastore(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(BadFile, match="damaged, cut off"):
        load_datastore(path)


def header(path: Path) -> dict[str, str]:
    content = path.read_bytes()
    about: dict[str, str] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])[
        "__metadata__"
    ]
    return about


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"about": {}}, "not a datastore"),
        ({"version": "2"}, "format 2, and this is read: 1"),
        ({"tokens": None}, "`tokens` is missing"),
        ({"suffixes": np.arange(4, dtype=np.float32)}, "`suffixes` is missing or of another kind"),
        ({"tokens": np.zeros((2, 2), np.uint16)}, "`tokens` is missing or of another kind"),
        ({"tokens": np.zeros(0, np.uint16)}, "`tokens` is missing or of another kind"),
        ({"suffixes": np.array([0, 1, 2, 4], np.int32)}, "outside"),
        ({"suffixes": np.array([-1, 1, 2, 3], np.int32)}, "outside"),
        ({"suffixes": np.array([0, 1, 2], np.int32)}, "outside"),
        ({"tokens": np.array([0, 1, 9, 2], np.uint16)}, "outside"),
        ({"tokens": np.array([0, 1, 2, 1], np.uint16)}, "outside"),
        ({"tokens": np.array([0, 1, 1, 1], np.uint16)}, "outside"),
        ({"vocab": "many"}, "its header lacks"),
        ({"documents": None}, "its header lacks"),
        ({"sha256": "0"}, "its checksum"),
    ],
    ids=str,
)
def test_a_foreign_or_wrong_file_is_refused_even_if_its_checksum_is_right(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "x.safetensors"
    build_datastore(path, [[0, 1, 1]])
    arrays, about = load_file(path), header(path)
    for name, value in change.items():
        name = "foretell_datastore" if name == "version" else name
        place: dict[str, object] = arrays if name in arrays else about  # type: ignore[assignment]
        place.pop(name, None)
        if name == "about":
            about = {}
        elif value is not None:
            place[name] = value
    if about and "sha256" not in change and len(arrays) == 2:
        about["sha256"] = content_checksum(about, arrays["tokens"], arrays["suffixes"])
    save_file(arrays, path, about)
    with pytest.raises(BadFile, match=said) as raised:
        load_datastore(path)
    assert str(path) in str(raised.value) and datastore.BUILD in str(raised.value)


def test_no_file_is_told_with_the_cure(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadFile, match="no such datastore; build one with foretell datastore"):
            load_datastore(path)


def test_ids_of_another_model_are_refused(tmp_path: Path) -> None:
    store = build_datastore(tmp_path / "x.safetensors", TEXTS, spell)
    store.check_model(3, spell)
    store.check_model(99, None)  # a model may have more ids than its tokenizer
    with pytest.raises(BadFile, match="token ids up to 2 and the model's end at 1") as raised:
        store.check_model(2, spell)
    assert datastore.BUILD in str(raised.value)
    with pytest.raises(BadFile, match="another tokenizer"):
        store.check_model(3, lambda ids: spell([2 - t for t in ids]))
    build_datastore(tmp_path / "y.safetensors", TEXTS).check_model(
        3, lambda ids: "anything"
    )  # built from ids, of nobody knows whom


def test_a_fingerprint_depends_on_ids_over_the_whole_vocabulary() -> None:
    base = tokenizer_mark(str, 50_000)
    assert base == tokenizer_mark(lambda ids: str(list(ids)), 50_000) and base != tokenizer_mark(
        str, 50_001
    )
    for low in range(0, 50_000, 5000):
        assert base != tokenizer_mark(
            lambda ids, low=low: "?" if low <= ids[0] < low + 200 else str(ids), 50_000
        )
    assert tokenizer_mark(lambda ids: "\udc80", 3) == tokenizer_mark(lambda ids: "?", 3), (
        "half a character is no mishap"
    )


def test_a_full_disk_is_one_error_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    build_datastore(path, TEXTS)
    before = path.read_bytes()
    with full_disk(len(before)), pytest.raises(BadFile, match=r"cannot be written \(File too"):
        build_datastore(path, [[0, 1, 2] * 1000])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert load_datastore(path).documents == 3
