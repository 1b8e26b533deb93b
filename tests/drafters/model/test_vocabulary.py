"""Which tokens are kept: the closed form is the best of all choices, and files are checked."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from foretell.drafters.model.vocabulary import (
    Ranking,
    counts_of,
    load_kept_tokens,
    save_kept_tokens,
)
from foretell.errors import BadConfig, BadFile


def worth(counts: np.ndarray, kept: set[int], share: float, alpha: float) -> float:
    covered = sum(int(counts[token]) for token in kept) / int(counts.sum())
    return alpha * covered + (1 - alpha) * (len(counts) - len(kept)) * share


def test_counts_are_those_of_all_texts() -> None:
    assert counts_of([[1, 2, 2], [], [0, 2]], 5).tolist() == [1, 1, 3, 0, 0]


def test_the_closed_form_is_the_best_of_all_subsets() -> None:
    """Of every set of tokens that has the forced ones and covers enough, none is worth more."""
    draw = np.random.default_rng(1)
    sizes = set()
    for _ in range(120):
        vocab = int(draw.integers(2, 8))
        counts = draw.integers(0, 9, vocab)
        counts[int(draw.integers(vocab))] += 1
        forced = {int(token) for token in draw.integers(0, vocab, int(draw.integers(0, 3)))}
        share = float(draw.random() / vocab)
        alpha, least = float(0.05 + 0.95 * draw.random()), float(draw.choice([0, 0.5, 0.9, 1]))
        ranking = Ranking(counts, forced, share)
        size = ranking.best_size(alpha, least)
        ours = ranking.kept_tokens(size)
        assert forced <= {*ours} and ours == sorted({*ours}) and len(ours) == size > 0
        assert ranking.token_coverage(size) >= least
        best = -1.0
        for count in range(1, vocab + 1):
            for some in itertools.combinations(range(vocab), count):
                covered = sum(int(counts[token]) for token in some) / int(counts.sum())
                if forced <= {*some} and covered >= least:
                    best = max(best, worth(counts, {*some}, share, alpha))
        got = worth(counts, {*ours}, share, alpha)
        assert got == pytest.approx(best, abs=1e-12)
        assert ranking.size_utility(size, alpha) == pytest.approx(got, abs=1e-12)
        sizes.add(size / vocab)
    assert min(sizes) < 0.5 and max(sizes) == 1.0


def test_the_scan_over_sizes_of_a_large_vocabulary_agrees() -> None:
    draw = np.random.default_rng(2)
    counts = (1e5 / (1 + np.arange(3000)) ** 1.1).astype(np.int64)
    draw.shuffle(counts)
    ranking = Ranking(counts, [7, 2999], 2.1e-4)
    for alpha in (0.1, 0.5, 0.7, 1.0):
        sizes = range(ranking.least, 3001)
        best = max(sizes, key=lambda size: (ranking.size_utility(size, alpha), -size))
        assert ranking.best_size(alpha) == best
    assert ranking.token_coverage(3000) == 1.0 and ranking.saved_share(3000) == 0.0


def test_the_least_coverage_holds_where_little_weight_is_on_it() -> None:
    counts = np.array([60, 30, 9, 1, 0])
    ranking = Ranking(counts, [], 0.15)
    assert ranking.best_size(0.01) == 1 and ranking.best_size(0.01, 0.6) == 1
    assert ranking.best_size(0.01, 0.61) == 2 and ranking.best_size(0.01, 1.0) == 4
    assert ranking.kept_tokens(3) == [0, 1, 2] and ranking.best_size(1.0) == 4
    # Special tokens stay, and of equal counts the lower id comes first.
    assert Ranking(np.array([3, 3, 5, 0]), [3], 0.1).kept_tokens(2) == [2, 3]
    assert Ranking(np.array([3, 3, 5, 0]), [3], 0.1).kept_tokens(3) == [0, 2, 3]


def test_bad_choices_are_told() -> None:
    ranking = Ranking(np.array([1, 2]), [], 0.1)
    for alpha in (0.0, -1.0, 1.5):
        with pytest.raises(BadConfig, match=r"alpha=.*above 0 and at most 1"):
            ranking.best_size(alpha)
    with pytest.raises(BadConfig, match="no tokens"):
        Ranking(np.array([0, 0]), [], 0.1)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "new" / "kept.json"
    save_kept_tokens(file, [0, 3, 4], 6, None, [{"size": 3}])
    kept = load_kept_tokens(file)
    assert kept.ids == (0, 3, 4) and kept.vocab == 6 and kept.mark == ""
    kept.check_model(5, None)
    with pytest.raises(BadFile, match="keeps token 4 and the model's end at 3"):
        kept.check_model(4, None)
    save_kept_tokens(file, [0, 3], 6, lambda ids: chr(65 + ids[0]), [])
    load_kept_tokens(file).check_model(6, lambda ids: chr(65 + ids[0]))
    with pytest.raises(BadFile, match="another tokenizer"):
        load_kept_tokens(file).check_model(6, lambda ids: chr(97 + ids[0]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"foretell_kept_tokens": 9}, "format 9"),
        ({"ids": []}, "damaged"),
        ({"ids": [2, 1]}, "not in order"),
        ({"ids": [1, 1]}, "not in order"),
        ({"ids": [-1, 2]}, "outside its vocabulary"),
        ({"ids": [1, 6]}, "outside its vocabulary"),
        ({"ids": [1, True]}, "damaged"),
        ({"vocab": "6"}, "damaged"),
        ({"tokenizer": None}, "damaged"),
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    save_kept_tokens(file, [1, 2], 6, None, [])
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(BadFile, match=said) as told:
        load_kept_tokens(file)
    assert str(file) in str(told.value) and "foretell trim" in str(told.value)


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[1]", b"{}"])
def test_what_is_no_such_file_is_refused(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    with pytest.raises(BadFile, match="no such file"):
        load_kept_tokens(file)
    file.write_bytes(text)
    with pytest.raises(BadFile, match="foretell trim"):
        load_kept_tokens(file)
