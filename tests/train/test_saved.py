"""What a run goes on from is what it wrote: whatever is damaged is refused in one line, and nothing
is filled up by repeating a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.errors import BadFile
from foretell.train import answers
from foretell.train.corpus import prepare_corpus
from foretell.train.diffusion import dlm
from foretell.train.heads.head_data import Corpus
from foretell.train.lm import Run, TrainLM, build_llama
from foretell.train.states import load_states

SIZES = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 16}
LENGTHS = {"vocab_size": 300, "context": 16, "short_context": 16, "batch": 64, "micro": 64}
TINY = TrainLM(**SIZES, **LENGTHS, tokens=256, warmup=1)
Tensors = dict[str, torch.Tensor]


def run_in(folder: Path) -> Run:
    model = build_llama(TINY, end=0)
    return Run(folder, TINY, model, model.model.layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, as it was saved."""
    folder = tmp_path_factory.mktemp("run")
    run = run_in(folder)
    data = np.arange(1000, dtype=np.uint16) % 300
    for _ in range(2):
        run.advance(data, None)
    run.save()
    assert run_in(folder).step == 2
    return folder


def of_first(tensors: Tensors, beginning: str, change: Callable[[torch.Tensor], object]) -> None:
    name = next(n for n in tensors if n.startswith(beginning) and tensors[n].dim() == 2)
    tensors[name] = change(tensors[name])  # type: ignore[assignment]


def spoil_last(tensors: Tensors) -> None:
    state = next(name for name in tensors if name.startswith("optimiser.1.0."))
    tensors[state.replace(".0.", ".99.", 1)] = tensors.pop(state)


SPOILT: dict[str, Callable[[Tensors], object]] = {
    "a weight of one row": lambda t: of_first(t, "model.", lambda w: w[:1].clone()),
    "a weight of one number": lambda t: of_first(t, "model.", lambda w: w[:1, :1].clone()),
    "a weight that is turned": lambda t: of_first(t, "model.model.l", lambda w: w.flatten()),
    "a weight of whole numbers": lambda t: of_first(t, "model.", lambda w: w.int()),
    "a weight that is no number": lambda t: of_first(t, "model.", lambda w: w * torch.nan),
    "a weight less": lambda t: t.pop(next(n for n in t if n.startswith("model."))),
    "a weight more": lambda t: t.update({"model.else": torch.zeros(2)}),
    "a state of one row": lambda t: of_first(t, "optimiser.", lambda w: w[:1].clone()),
    "a state that is infinite": lambda t: of_first(t, "optimiser.", lambda w: w + torch.inf),
    "a state of no parameter": spoil_last,
    "a state without a number": lambda t: t.update({"optimiser.0.first.x": torch.zeros(1)}),
    "no step": lambda t: t.pop("step"),
    "a step of two numbers": lambda t: t.update(step=torch.tensor([1, 2])),
    "a step beyond the last": lambda t: t.update(step=torch.tensor(10**9)),
    "a step below the first": lambda t: t.update(step=torch.tensor(-5)),
    "a broken step": lambda t: t.update(step=torch.tensor(1.5)),
    "something else": lambda t: t.update({"extra.x": torch.zeros(1)}),
}


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for name in ("state.safetensors", "train.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def refused(folder: Path, name: str = "state.safetensors") -> None:
    before = (folder / name).read_bytes()
    with pytest.raises(BadFile, match=rf"{name}: is damaged or of another run") as told:
        run_in(folder)
    assert "\n" not in str(told.value) and "delete it" in str(told.value)
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("what", SPOILT)
def test_a_state_that_is_not_the_run_s_is_refused(what: str, folder: Path, tmp_path: Path) -> None:
    here = copied(folder, tmp_path / "run")
    tensors = load_file(here / "state.safetensors")
    SPOILT[what](tensors)
    save_file(tensors, here / "state.safetensors")
    refused(here)


@pytest.mark.parametrize("data", [b"", b"no tensors", bytes(100)])
def test_so_is_a_file_that_is_none(data: bytes, folder: Path, tmp_path: Path) -> None:
    here = copied(folder, tmp_path / "run")
    (here / "state.safetensors").write_bytes(data)
    refused(here)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_so_are_settings_that_are_none(text: str, folder: Path, tmp_path: Path) -> None:
    here = copied(folder, tmp_path / "run")
    (here / "train.json").write_text(text)
    refused(here, "train.json")


# --- texts


def test_a_corpus_that_is_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(150):  # one of 100 is held out
        (tmp_path / "texts" / f"{i}.txt").write_text(f"line {i} of the texts\n" * 5)
    made = tmp_path / "corpus"
    sources = [str(tmp_path / "texts")]
    info = prepare_corpus(made, sources, 300)
    assert prepare_corpus(made, sources, 300) == info
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    spoilt = {
        "train.bin": [files["train.bin"][:-2], files["train.bin"][:-2] + b"\xff\xff"],
        "heldout.bin": [b"", files["heldout.bin"] + b"\0"],
        "heldout.jsonl": [b"", b"{}\n", files["heldout.jsonl"] + b"{", b"[" * 100_000],
        "tokenizer.json": [b"", b"{}", b"[" * 100_000],
        "corpus.json": [b"", b"{", b"[]", b"{}", b"[" * 100_000],
    }
    for name, several in spoilt.items():
        for data in several:
            (made / name).write_bytes(data)
            with pytest.raises(BadFile, match=r"corpus.json: its files are damaged") as told:
                prepare_corpus(made, sources, 300)
            assert "\n" not in str(told.value)
        (made / name).write_bytes(files[name])
    assert prepare_corpus(made, sources, 300) == info


def arrays_of(path: Path) -> Tensors:
    texts = [answers.plain_text(range(start, start + 12)) for start in (1, 20)]
    answers.save_texts(path, texts)
    return load_file(path)


def first(tensor: torch.Tensor, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


@pytest.mark.parametrize(
    "name, change",
    [
        ("tokens", lambda t: t[:-1].clone()),
        ("tokens", lambda t: first(t, -1)),
        ("tokens", lambda t: t.float()),
        ("starts", lambda t: t + 1),
        ("starts", lambda t: t.flip(0)),
        ("starts", lambda t: t[:0].clone()),
        ("prompts", lambda t: t[:1].clone()),
        ("prompts", lambda t: t * 100),
        ("prompts", lambda t: t - 5),
        ("best", lambda t: t[:1].clone()),
        ("best", lambda t: t.flatten()),
        ("logprobs", lambda t: t[:3].clone()),
    ],
)
def test_answers_whose_parts_do_not_belong_together_are_refused(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "00000.safetensors"
    tensors = arrays_of(path)
    assert len(list(answers.read_texts(path))) == 2
    save_file({**tensors, name: change(tensors[name]).contiguous()}, path)
    with pytest.raises(BadFile, match=r"no file of answers"):
        list(answers.read_texts(path))


def test_so_are_states_of_other_texts(tmp_path: Path) -> None:
    path, beside = tmp_path / "00000.safetensors", tmp_path / "states.safetensors"
    arrays_of(path)
    for states in (
        torch.zeros(23, 4),
        torch.zeros(1, 4),
        torch.zeros(24),
        torch.zeros(24, 4).int(),
    ):
        save_file({"states": states}, beside)
        with pytest.raises(BadFile, match=r"states.safetensors"):
            Corpus([path], [beside], 64)
    save_file({"other": torch.zeros(24, 4)}, beside)
    with pytest.raises(BadFile, match="no file of states"):
        load_states(beside)


def test_so_are_texts_of_a_denoiser(tmp_path: Path) -> None:
    path = tmp_path / "texts.safetensors"
    texts = [dlm.Example(np.arange(4), 2, False), dlm.Example(np.arange(3), 1, True)]
    assert len(dlm.keep_texts(path, lambda: texts)) == 2
    tensors = load_file(path)
    for name, value in (
        ("starts", torch.tensor([0, 9, 7])),
        ("starts", torch.tensor([], dtype=torch.long)),
        ("given", torch.tensor([2])),
        ("given", torch.tensor([9, 1])),
        ("cut", torch.tensor([True])),
        ("ids", torch.tensor([-1] * 7)),
    ):
        save_file({**tensors, name: value}, path)
        with pytest.raises(BadFile, match="is no file of texts"):
            dlm.keep_texts(path, lambda: texts)
    path.write_text(json.dumps({}))
    with pytest.raises(BadFile, match="is no file of texts"):
        dlm.keep_texts(path, lambda: texts)
