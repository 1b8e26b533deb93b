"""train/processes.py: several processes together train what one does."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.launchers import debug_launcher
from safetensors.torch import load_file

from foretell.errors import BadConfig
from foretell.train import draft
from foretell.train.heads.head import HeadRun
from foretell.train.lm import Run
from foretell.train.processes import Processes
from tests import tiny
from tests.train import test_draft
from tests.train.heads.test_head import SETTINGS, files, run
from tests.train.test_draft import files as drafts_files

FOUR = dataclasses.replace(SETTINGS, batch=256, tokens=256 * 5)  # micro batches a step
assert files is not None and drafts_files is not None  # fixtures


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = load_file(folder / "state.safetensors")
    return {name: value for name, value in state.items() if name.startswith("model.")}


def apart(one: Path, other: Path) -> float:
    """The largest difference between the weights of two runs."""
    ours, theirs = weights(one), weights(other)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def together(function: Callable[..., Any], *args: Any) -> None:
    """Runs it in two processes that know each other by gloo."""
    debug_launcher(function, args, num_processes=2)


def test_two_processes_train_the_head_that_one_does(files: Any, tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    report = run(files, alone, FOUR)
    together(run, files, both, FOUR)
    assert apart(alone, both) < 1e-5
    told = json.loads((both / "report.json").read_text())
    assert told["hits"] == report["hits"] and told["settings"] == report["settings"]
    assert len((both / "log.jsonl").read_text().splitlines()) == 5
    one, other = (
        [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in (alone, both)
    )
    assert one == pytest.approx(other, abs=2e-4)


def test_without_the_others_gradients_the_weights_are_others(files: Any, tmp_path: Path) -> None:
    """So the tests above would notice a process that kept its gradients to itself."""
    run(files, tmp_path / "alone", FOUR)

    def selfish(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Processes, "add_gradients", lambda self, parameters: None)
            run(*args)

    together(selfish, files, tmp_path / "both", FOUR)
    assert apart(tmp_path / "alone", tmp_path / "both") > 1e-3


def test_two_processes_go_on_where_one_stopped(files: Any, tmp_path: Path) -> None:
    run(files, tmp_path / "whole", FOUR)
    advance = HeadRun.advance_on

    def stopping(self: HeadRun, *args: Any) -> float:
        if self.step == 3:
            self.save()
            raise KeyboardInterrupt
        return advance(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadRun, "advance_on", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(files, tmp_path / "parts", FOUR)
    together(run, files, tmp_path / "parts", FOUR)
    assert apart(tmp_path / "whole", tmp_path / "parts") < 1e-5


def test_two_processes_train_the_draft_model_that_one_does(
    drafts_files: list[Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(test_draft.TINY, tokens=5 * 128)
    lm = tiny.lm()

    def train(out: Path) -> None:
        draft.train_draft(lm, drafts_files, out, config, quiet=True)

    train(tmp_path / "alone")
    together(train, tmp_path / "both")
    assert apart(tmp_path / "alone", tmp_path / "both") < 1e-5
    one, other = (
        json.loads((tmp_path / name / "report.json").read_text())["held_back"]
        for name in ("alone", "both")
    )
    assert one == other


def test_all_stop_behind_the_same_step(files: Any, tmp_path: Path) -> None:
    """One of them is interrupted, and the others end with it; what was done is kept."""

    def interrupted(*args: Any) -> None:
        advance = HeadRun.advance_on

        def raising(self: HeadRun, *given: Any) -> float:
            loss = advance(self, *given)
            if self.step == 2 and self.processes.index == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return loss

        HeadRun.advance_on = raising  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            run(*args)

    together(interrupted, files, tmp_path / "run", FOUR)
    assert int(load_file(tmp_path / "run" / "state.safetensors")["step"]) == 2


def test_a_gradient_that_one_process_lacks_counts_as_nothing() -> None:
    together(_ragged_gradients)


def _ragged_gradients() -> None:
    processes = Processes()
    everywhere, once, nowhere = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    everywhere.grad = torch.tensor([1.0, 2.0]) * (1 + processes.index)
    if processes.index:
        once.grad = torch.tensor([5.0, 7.0])
    processes.add_gradients([everywhere, once, nowhere])
    assert everywhere.grad.tolist() == [3, 6]
    assert once.grad is not None and once.grad.tolist() == [5, 7]
    assert nowhere.grad is None
    assert processes.total(1.5 + processes.index) == 4
    assert [*processes.share(4)] == [processes.index, processes.index + 2]


def test_what_cannot_be_shared_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes = Processes()
    processes.check(192, 64)
    processes.count = 2
    with pytest.raises(BadConfig, match=r"3 micro batches .* by 2 processes; give --batch 256"):
        processes.check(192, 64)
    with pytest.raises(BadConfig, match="device='nowhere' cannot be used"):
        Processes("nowhere")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadConfig, match="--device cuda:1: each of several processes"):
        Processes("cuda:1")
    with pytest.raises(BadConfig, match="start it without `accelerate launch`"):
        Run(tmp_path, SETTINGS, torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
