"""train/exits.py: what exits agree in, what thresholds promise, and that the best are found."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import foretell
from foretell.drafters.model.exit_table import FIELD, trained_exits, write_exit_table
from foretell.drafters.model.lazy_layers import LazyLayers
from foretell.errors import BadConfig, BadFile
from foretell.ops.fingerprint import norm_mark
from foretell.train import answers, exits
from foretell.train.answers import Text
from foretell.train.exits import OUT, Seconds, Seen
from tests import tiny

SECONDS = Seconds({(2,): (6.0,), (0, 2): (2.0, 5.0), (1, 2): (4.0, 3.0), (0, 1, 2): (2, 3, 3)}, 20)


def seen(seed: int = 0, sizes: tuple[int, ...] = (30, 3, 25)) -> Seen:
    draw = np.random.default_rng(seed)
    count = sum(sizes)
    chances, drawn = np.sort(draw.random((2, 3, count)), 1)
    greedy = (draw.random((3, count)) < chances).astype(float)
    return Seen(chances, greedy, drawn, [0, *np.cumsum(sizes)[:-1].tolist()])


def by_hand(data: Seen, thresholds: tuple[float, ...], length: int) -> tuple[float, float, float]:
    """The same by plain loops over places and drafts."""
    count = data.chances.shape[1]
    used = tuple(place for place in range(3) if place == 2 or thresholds[place] <= 1)
    chosen, spent = [], []
    for at in range(count):
        taken = 0.0
        for place, cost in zip(used, SECONDS.draft[used], strict=True):
            taken += cost
            if place == 2 or data.chances[place, at] >= thresholds[place]:
                break
        chosen.append(place)
        spent.append(taken)
    tokens = []
    for agreed in (data.greedy, data.sampled):
        total = []
        for start, end in zip(data.starts, [*data.starts[1:], count], strict=True):
            for first in range(start, end - length + 1):
                reach, sum_ = 1.0, 0.0
                for at in range(first, first + length):
                    reach *= agreed[chosen[at], at]
                    sum_ += reach
                total.append(sum_)
        tokens.append(1 + sum(total) / len(total))
    cost = length * sum(spent) / count + SECONDS.target
    return sum(tokens) / 2 / cost, tokens[0], tokens[1]


def test_a_promise_is_what_loops_over_all_drafts_count() -> None:
    for thresholds in ((0.3, 0.6), (0.5, OUT), (OUT, 0.4), (OUT, OUT), (0.0, 0.0)):
        *found, shares = exits.promised_speed(seen(), SECONDS, thresholds, 4)
        assert found == pytest.approx(by_hand(seen(), thresholds, 4))
        assert sum(shares) == pytest.approx(1)
    assert exits.promised_speed(seen(), SECONDS, (0.0, 0.5), 4)[3] == [1, 0, 0]
    assert exits.promised_speed(seen(), SECONDS, (OUT, OUT), 4)[3] == [0, 0, 1]


def test_the_best_of_all_thresholds_is_found_and_follows_the_costs() -> None:
    data = seen(1)
    tried = list(itertools.product((*exits.GRID, OUT), repeat=2))
    speeds = {one: by_hand(data, one, 4)[0] for one in tried}
    assert speeds[exits.best_thresholds(data, SECONDS, 4)] == pytest.approx(max(speeds.values()))
    free = Seconds({used: [0.0] * len(used) for used in SECONDS.draft}, 1.0)
    dear = Seconds({used: [10.0 * (place + 1) for place in used] for used in SECONDS.draft}, 1.0)
    assert exits.best_thresholds(data, dear, 4) == (0.0, 0.0), "drafting costs all: the first exit"
    shares = exits.promised_speed(data, free, exits.best_thresholds(data, free, 4), 4)[3]
    assert shares[2] > 0.4, "drafting costs nothing: the exits that agree most"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model with exits."""
    model = tiny.relative(tiny.llama())
    setattr(model.config, FIELD, {"layers": [1, 2]})
    return tiny.save(model, tmp_path_factory.mktemp("draft"))


def texts(count: int = 40) -> list[Text]:
    draw = np.random.default_rng(0)
    rows = np.zeros((9, 1), np.int32), np.zeros((9, 1), np.float16)
    return [Text(draw.integers(1, 300, 14).astype(np.int32), 5, *rows) for _ in range(count)]


def pair(tmp_path: Path, folder: Path) -> foretell.LM:
    target = tiny.save(tiny.llama(), tmp_path / "target")
    return foretell.load(target, draft=folder, backend="torch")


def test_exits_are_read_beside_the_target(tmp_path: Path, folder: Path) -> None:
    lm = pair(tmp_path, folder)
    target, draft = lm.models["target"], lm.models["draft"]
    given = texts(3)
    found = exits.look_at_answers(target, LazyLayers(draft, (1, 2), "s2d"), given, 64)
    assert found.starts == [0, 9, 18] and found.chances.shape == (2, 27)
    hf = tiny.relative(tiny.llama())
    for number, text in enumerate(given):
        ids = torch.from_numpy(text.tokens.astype(np.int64))[None]
        with torch.no_grad():
            p = tiny.llama()(input_ids=ids).logits[0, 4:-1].softmax(-1)
            out = hf.model(input_ids=ids, output_hidden_states=True)
            states = hf.model.norm(out.hidden_states[1]), out.last_hidden_state
            rows = [hf.lm_head(h)[0, 4:-1].softmax(-1) for h in states]
        here = slice(9 * number, 9 * number + 9)
        for place, q in enumerate(rows):
            assert found.chances[place, here] == pytest.approx(q.max(-1).values.numpy(), abs=1e-5)
            same = q.argmax(-1) == p.argmax(-1)
            assert found.greedy[place, here].tolist() == same.double().tolist()
            overlap = torch.minimum(p, q).sum(-1).numpy()
            assert found.sampled[place, here] == pytest.approx(overlap, abs=1e-5)
    with pytest.raises(BadConfig, match="no answers to measure on"):
        exits.look_at_answers(target, LazyLayers(draft, (1, 2), "s2d"), [], 64)


def test_what_is_found_stands_in_the_folder(tmp_path: Path, folder: Path) -> None:
    answers.save_texts(tmp_path / "a.safetensors", texts())
    lm = pair(tmp_path, folder)
    for _ in range(2):  # again: it takes the place of what was found before
        found = exits.calibrate_exits(lm, [tmp_path / "a.safetensors"], folder, 3, 64, name="tiny")
    told = trained_exits(foretell.load(folder).models["target"])
    assert told is not None and len(told.targets) == 1
    table = told.targets[0]
    assert table["norm"] == norm_mark(lm.models["target"]) and table["format"] == "float32"
    assert table["thresholds"] == found["thresholds"] and table["name"] == "tiny"
    assert told.thresholds_for(lm.models["target"]) == tuple(found["thresholds"])
    assert found["last_exit"]["tokens_per_s"] <= found["found"]["tokens_per_s"]


def test_a_folder_without_exits_is_refused(tmp_path: Path) -> None:
    plain = tiny.save(tiny.relative(tiny.llama()), tmp_path / "draft")
    lm = pair(tmp_path, plain)
    with pytest.raises(BadConfig, match="has no exits, and 2 to 4 are needed"):
        exits.calibrate_exits(lm, [], plain)
    with pytest.raises(BadFile, match="no configuration of a model with exits"):
        write_exit_table(plain, lm.models["target"], "tiny", {"thresholds": [0.5]})
    (plain / "config.json").write_text(json.dumps([]))
    with pytest.raises(BadFile):
        write_exit_table(plain, lm.models["target"], "tiny", {"thresholds": [0.5]})


def test_one_answer_of_those_that_training_leaves_out_is_measured(tmp_path: Path) -> None:
    """The same ones as in train/draft.py."""
    from foretell.train.draft import Texts

    answers.save_texts(tmp_path / "a.safetensors", texts(70))
    left_out = Texts([tmp_path / "a.safetensors"], 64).held_back
    found = list(exits.held_back([tmp_path / "a.safetensors"], 64))
    assert len(found) == len(left_out) == 3
    for ours, theirs in zip(found, left_out, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
