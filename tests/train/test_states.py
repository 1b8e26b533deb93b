"""States of texts: each token's own, in the order of the answers, kept from run to run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.errors import BadFile, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.testing.toy import ToyRecurrent
from foretell.train import answers, states
from foretell.train.states import load_states, write_states
from tests.models.decoder.families import tiny

TAPS = (1, 2)


@cache
def target() -> Decoder:
    return Decoder(tiny("llama"), "tiny")


def text(length: int, seed: int) -> answers.Text:
    tokens = np.random.default_rng(seed).integers(0, 90, length).astype(np.int32)
    nothing = np.zeros((length - 2, 1))
    return answers.Text(tokens, 2, nothing.astype(np.int32), nothing.astype(np.float16))


def test_each_token_has_its_own_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text(length, length) for length in (9, 30, 5)]
    answers.save_texts(tmp_path / "0.safetensors", texts)
    answers.save_texts(tmp_path / "1.safetensors", texts[:1])
    files = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    monkeypatch.setattr(states, "AT_ONCE", 12)  # the second text is in a forward of its own
    told: list[tuple[str, int, int]] = []
    made = write_states(target(), files, tmp_path / "s", TAPS, {}, lambda *step: told.append(step))
    assert told == [("states", 1, 2), ("states", 2, 2)]
    assert load_states(made[1]).shape[0] == 9
    rows = load_states(made[0])
    start = 0
    for one in texts:
        with torch.inference_mode():
            ids = torch.from_numpy(one.tokens.astype(np.int64))[None]
            hidden = target().hf(ids, output_hidden_states=True).hidden_states
        want = torch.cat([hidden[tap][0] for tap in TAPS], -1)
        got = rows[start : start + len(one.tokens)].float()
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
        start += len(one.tokens)
    assert start == len(rows)


def test_what_is_there_is_kept_and_what_is_of_others_is_refused(tmp_path: Path) -> None:
    answers.save_texts(tmp_path / "0.safetensors", [text(9, 1)])
    files, place = [tmp_path / "0.safetensors"], tmp_path / "s"
    (made,) = write_states(target(), files, place, TAPS, {"norm": "a"})
    before = made.stat().st_mtime_ns
    write_states(target(), files, place, TAPS, {"norm": "a"})
    assert made.stat().st_mtime_ns == before
    with pytest.raises(BadFile, match="states of norm=a, not b"):
        write_states(target(), files, place, TAPS, {"norm": "b"})
    with pytest.raises(BadFile, match=r"states of taps=\[1, 2\], not \[1\]"):
        write_states(target(), files, place, (1,), {"norm": "a"})
    made.write_bytes(made.read_bytes()[:20])
    with pytest.raises(BadFile, match="delete it"):
        write_states(target(), files, place, TAPS, {"norm": "a"})


def test_a_model_that_shows_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="train head cannot run on recurrent"):
        write_states(ToyRecurrent(), [], tmp_path, TAPS, {})
