"""Families with recurrent layers when loaded: what is tested, refused and left as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import foretell
from foretell import cli, wrap
from foretell.audit import checks
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import ForetellError, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.recurrent import mixers, recurrent, scans
from foretell.models.recurrent.mixers import Mixer, StateSpaceDual
from foretell.models.recurrent.recurrent import Recurrent
from foretell.speculation.strategy import Speculative
from tests import tiny as small
from tests.cache.users import Guess
from tests.models.decoder.families import RECURRENT, tiny
from tests.models.recurrent.test_recurrent import PROMPTS, adapter, answer, every_family, lm, stock

# --- slips: each must be caught


def refusal(hf: PreTrainedModel) -> str:
    with pytest.raises(Unsupported) as caught:
        wrap(hf, name="tiny")
    line = str(caught.value)
    assert "\n" not in line and f"(family {hf.config.model_type})" in line and "generate" in line
    return line


def slip_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are taken in, whatever was accepted."""
    after = Mixer.memory_after
    monkeypatch.setattr(
        Mixer, "memory_after", lambda self, held, path: after(self, held, range(len(held.rows)))
    )


def slip_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes go on from the node before them, which may be a sibling."""
    for kind in recurrent.KINDS.values():
        if "run_tree" in vars(kind):
            tree = kind.run_tree
            monkeypatch.setattr(
                kind,
                "run_tree",
                lambda self, state, steps, reads, parents, tree=tree: tree(
                    self, state, steps, reads, tuple(range(-1, len(parents) - 1))
                ),
            )
    from foretell.models.recurrent.stepwise import Stepwise

    by_node = Stepwise.run_tree
    monkeypatch.setattr(
        Stepwise,
        "run_tree",
        lambda self, state, steps, reads, parents: by_node(
            self, state, steps, reads, tuple(range(-1, len(parents) - 1))
        ),
    )


def slip_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution's window stays what it was."""
    monkeypatch.setattr(mixers, "slide_window", lambda window, rows: window)


def slip_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree is convolved as if it were a chain."""
    monkeypatch.setattr(
        mixers, "convolve_rows", lambda rows, parents, *rest: scans.convolve_rows(rows, None, *rest)
    )


def slip_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after a piece of the prompt is lost."""
    after = Mixer.memory_after
    monkeypatch.setattr(
        Mixer,
        "memory_after",
        lambda self, held, path: after(self, held, path) if path else held.text,
    )


def slip_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted drafts are replayed from the state before the pending tokens' end."""
    after = Mixer.memory_after

    def early(self: Mixer, held: Any, path: Sequence[int]) -> Any:
        return after(self, held, path[:-1])

    monkeypatch.setattr(Mixer, "memory_after", early)


SLIPS = (slip_rejected, slip_siblings, slip_window, slip_convolution, slip_pending, slip_replay)


@pytest.mark.parametrize("family", ["mamba2", "mamba", "qwen3_next", "recurrent_gemma"])
@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.__name__)
def test_a_wrong_mixer_is_refused_when_the_model_is_loaded(
    slip: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slip(monkeypatch)
    assert "self-test found" in refusal(stock(family))


# --- the model itself


@every_family
def test_the_model_stays_what_it_was(family: str) -> None:
    hf = tiny(family)
    kinds = [type(module) for module in hf.modules()]
    weights = {name: tensor.data_ptr() for name, tensor in hf.state_dict().items()}
    attention = hf.config._attn_implementation
    model = Recurrent(hf, family)
    assert model.hf is hf and [type(module) for module in hf.modules()] == kinds
    assert {name: tensor.data_ptr() for name, tensor in hf.state_dict().items()} == weights
    assert hf.config._attn_implementation == attention
    shared = {tensor.data_ptr() for tensor in model.twin.state_dict().values()}
    assert shared == set(weights.values())
    assert all("forward" not in vars(module) for module in hf.modules())
    tokens = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        before = hf(input_ids=tokens, use_cache=False).logits
        model.score(PROMPTS[0])
        assert torch.equal(hf(input_ids=tokens, use_cache=False).logits, before)


@every_family
def test_what_they_can_do(family: str) -> None:
    model = adapter(family)
    assert isinstance(model, Decoder) and model.caps == {"tree", "rows", "rollback"}
    assert model.mixers.keys() <= set(range(len(model.layout)))
    attends = [i for i, shape in enumerate(model.layout) if shape is not None]
    assert sorted({*attends, *model.mixers}) == [0, 1, 2]
    with pytest.raises(Unsupported, match="hidden states"):
        lm(family).generate(PROMPTS[0], taps_user(), max_new_tokens=4)


def taps_user() -> Any:
    class Reader(Guess):
        taps = (0,)

    return Speculative(Reader(), nodes=4)


@every_family
def test_in_bfloat16_it_is_as_near_as_transformers(family: str) -> None:
    """To the same weights in float32; and what states are kept in is float32."""
    hf = tiny(family, dtype=torch.bfloat16)
    model = Recurrent(hf, family)
    assert {start.state.dtype for start in model.start.values()} == {torch.float32}
    widened = tiny(family, dtype=torch.bfloat16).float()
    ids = torch.tensor([PROMPTS[1]])
    with torch.inference_mode():
        want, theirs = (one(input_ids=ids, use_cache=False).logits[0, -1] for one in (widened, hf))
    ours = model.score(PROMPTS[1])[0]
    distances = [float((row.float() - want).abs().max()) for row in (ours, theirs)]
    assert distances[0] <= 3 * distances[1] + 0.02 * float(want.abs().max())


def test_the_list_of_proven_families_is_the_list_of_tested_ones() -> None:
    assert set(RECURRENT) == recurrent.PROVEN


# --- what is refused, by name


def test_families_whose_own_two_ways_differ_are_refused() -> None:
    """transformers bounds the time steps of a prompt and not those of single tokens."""
    more = {"time_step_limit": (0.01, 0.1)}
    for family, fields in (("mamba2", more), ("zamba2", {}), ("nemotron_h", {})):
        with pytest.raises(Unsupported, match="the same time steps in a prompt and after it"):
            wrap(bounded(family, fields), name=family)


def bounded(family: str, fields: dict[str, Any]) -> PreTrainedModel:
    if family == "zamba2":
        fields = {
            "n_mamba_heads": 8,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "mamba", "hybrid"],
            "use_mamba_kernels": True,
        }
    elif family == "nemotron_h":
        fields = {
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "attention", "mamba"],
            "head_dim": 8,
        }
    return tiny(family, **fields)


def test_own_steps_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of time steps again, where nothing but the self-test looks at it."""
    monkeypatch.setattr(StateSpaceDual, "refusal_reason", lambda self: None)
    hf = tiny("mamba2")
    update = hf.backbone.layers[0].mixer
    steps = type(update).forward

    def other(self: Any, hidden_states: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        out: torch.Tensor = steps(self, hidden_states, *args, **given)
        return 1.5 * out if hidden_states.shape[1] == 1 else out

    monkeypatch.setattr(type(update), "forward", other)
    assert "steps of `generate`" in refusal(hf)


@torch.inference_mode()
def test_an_audit_notices_a_wrong_state() -> None:
    """It compares rows of layers that attend, and what states make of one more token."""
    for family in ("mamba2", "falcon_h1"):
        model, tokens = adapter(family), [*PROMPTS[0], 1, 2, 9]
        held = model.cache()
        answer(model, held, Ask(TokenTree(PROMPTS[0][-1]).chain([1, 2])), PROMPTS[0])
        wrong = held.fork()
        assert checks._row_distance(model, held, tokens) < 1e-4
        wrong.commit(tokens)
        for layer in wrong.held.values():
            layer.text = replace(layer.text, state=layer.text.state * 1.5)
        assert checks._row_distance(model, wrong, tokens) > 1e-2


# --- from a folder


def test_folders_and_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for family in ("mamba2", "jamba"):
        words = len(small.tokenizer())
        folder = small.save(tiny(family, vocab_size=words), tmp_path / family)
        loaded = foretell.load(folder, dtype="float32")
        assert isinstance(loaded.models["target"], Recurrent)
        plain = loaded.generate("def add(a, b):", "plain", max_new_tokens=12)
        for method in ("ngram", "token-recycling", "suffix"):
            quick = loaded.generate("def add(a, b):", method, max_new_tokens=12)
            assert quick.tokens == plain.tokens
        command = ["generate", "--model", str(folder), "--method", "ngram"]
        code = cli.run([*command, "--max-new-tokens", "12", "def add(a, b):"])
        out, err = capsys.readouterr()
        assert code == 0 and out == plain.text + "\n" and "Traceback" not in err
        assert cli.run(["doctor", str(folder)]) == 0 and family in capsys.readouterr().out


def test_options_that_torch_cannot_honour_are_refused(tmp_path: Any) -> None:
    folder = small.save(tiny("mamba2", vocab_size=len(small.tokenizer())), tmp_path / "mamba2")
    for options in ({"backend": "native"}, {"exact_bits": True}):
        with pytest.raises(ForetellError, match="a model without recurrent layers") as caught:
            foretell.load(folder, **options)
        assert "\n" not in str(caught.value) and str(next(iter(options))) in str(caught.value)
