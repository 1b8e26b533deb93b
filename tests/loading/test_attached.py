"""An adapter is made once for a model, and anew where the model has changed."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import foretell
from foretell.api import diagnosis
from foretell.loading import attached
from foretell.models.decoder import decoder
from tests import tiny

INFO = Path("/proc/cpuinfo")
FLAGS = INFO.read_text().split() if INFO.exists() else ()
PROMPT = torch.tensor([[5, 6, 7, 5, 6]])


def generated(hf: PreTrainedModel, hook: Any = None) -> list[int]:
    ids = hf.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=12,
        do_sample=False,
        custom_generate=hook,
    )
    return ids[0].tolist()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The adapters that are made."""
    names: list[str] = []
    real = decoder.Decoder.__init__

    def init(self: Any, hf: Any, name: str, *more: Any) -> None:
        names.append(name)
        real(self, hf, name, *more)

    monkeypatch.setattr(decoder.Decoder, "__init__", init)
    return names


def test_it_is_made_once_for_any_number_of_calls_and_hooks(made: list[str]) -> None:
    hf = tiny.llama()
    expected = generated(hf)
    for hook in (foretell.hf("suffix"), foretell.hf("ngram")):
        assert generated(hf, hook) == generated(hf, hook) == expected
    assert made == ["llama"]
    assert generated(hf) == expected, "the model is still usable by itself"


def test_in_16_bits_its_layers_are_joined_and_drafts_round_nothing_otherwise() -> None:
    """Stock layers round a row by how many there are: a text was another one at the third call."""
    hf = tiny.llama().bfloat16()
    # Beyond eight rows oneDNN rounds otherwise on some of these processors.
    plain, hook = generated(hf, foretell.hf("plain")), foretell.hf("suffix:nodes=6")
    assert attached.attached_adapter(hf, "llama").fused
    if "avx512_bf16" in FLAGS:
        assert all(generated(hf, hook) == plain for _ in range(3))


def test_changed_weights_count_and_other_parts_make_another(made: list[str]) -> None:
    hf, hook = tiny.llama(), foretell.hf("ngram")
    generated(hf, hook)
    with torch.no_grad():  # as an optimiser does it
        for p in hf.parameters():
            p += 0.02 * torch.randn_like(p)
    assert generated(hf, hook) == generated(hf) and len(made) == 1
    layer: Any = hf.model.layers[1]
    layer.mlp.down_proj = torch.nn.Linear(48, 32, bias=False)
    assert generated(hf, hook) == generated(hf) and len(made) == 2
    hf.load_state_dict(tiny.llama(3).state_dict(), assign=True)
    assert generated(hf, hook) == generated(hf) == generated(tiny.llama(3)) and len(made) == 3
    handle = layer.mlp.register_forward_hook(lambda module, given, out: out * 0.3)
    hooked = generated(hf)
    assert generated(hf, hook) == hooked and len(made) == 4, "it acts in our forwards as well"
    assert foretell.wrap(hf).generate(PROMPT[0], "plain", max_new_tokens=12).tokens == hooked[5:]
    handle.remove()
    assert generated(hf, hook) == generated(hf) != hooked
    hf.double()
    assert generated(hf, hook) == generated(hf)


def test_it_goes_with_the_model_and_copies_begin_without(made: list[str]) -> None:
    hf, hook = tiny.llama(), foretell.hf("ngram")
    expected = generated(hf, hook)
    for twin in (copy.deepcopy(hf), saved(hf)):
        assert not isinstance(twin.__dict__[attached.NAME], attached._Kept)
        assert generated(twin, hook) == expected
    assert len(made) == 3
    gone = weakref.ref(hf)
    del hf, twin
    gc.collect()
    assert gone() is None


def saved(hf: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(hf, file)
    file.seek(0)
    twin: PreTrainedModel = torch.load(file, weights_only=False)
    return twin


def test_a_model_in_training_can_go_on() -> None:
    hf, hook = tiny.llama(), foretell.hf("ngram")
    hf.train()
    for use in (lambda: generated(hf, hook), lambda: foretell.wrap(hf).generate(PROMPT[0])):
        use()
        hf.train()
        generated(hf, hook)
        assert hf.training
        hf(PROMPT, labels=PROMPT).loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in hf.parameters())


def test_it_is_said_once_that_loading_would_be_quicker(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_shown_notices", set())
    monkeypatch.setattr(
        diagnosis.registry, "whole_backends", lambda hf, kind: iter([("native", None)])
    )
    hf = tiny.llama()
    foretell.wrap(hf)
    assert capsys.readouterr().err == "", "there is no folder to load"
    hf.config.name_or_path = str(tmp_path)
    for _ in range(2):
        foretell.wrap(hf)
        generated(hf, foretell.hf("ngram"))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"foretell.load({str(tmp_path)!r})" in err and "native" in err
