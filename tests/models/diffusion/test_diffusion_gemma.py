"""DiffusionGemma: rows, accepted sets and texts are those of transformers, given its draws."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
)

from foretell.api.lm import LM
from foretell.core.masked_text import make_look
from foretell.diffusion.renoise import Renoise
from foretell.engine.engine import Engine
from foretell.errors import Unsupported
from foretell.loading.load import load
from foretell.models.diffusion.diffusion_gemma import DiffusionGemma
from tests import tiny
from tests.diffusion.worlds import request, text

CANVAS = 6
PROMPT = [5, 17, 3, 40, 9, 22, 5, 31, 8]  # longer than a window


def config(**more: Any) -> DiffusionGemmaConfig:
    words = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 96,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "initializer_range": 0.3,
        "use_bidirectional_attention": "vision",
        **more,
    }
    sight = {
        "model_type": "gemma4_vision",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 16,
    }
    return DiffusionGemmaConfig(
        text_config=words,
        vision_config=sight,
        canvas_length=CANVAS,
        image_token_id=63,
        boi_token_id=62,
        eoi_token_id=61,
        initializer_range=0.3,
    )


def hf(seed: int = 0, **more: Any) -> DiffusionGemmaForBlockDiffusion:
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(config(**more)).eval()
    with torch.no_grad():  # a scale of its own, which encoder and decoder do not share
        for number, layer in enumerate(model.model.encoder.language_model.layers):
            layer.layer_scalar.fill_(0.8 + 0.1 * number)
        for number, layer in enumerate(model.model.decoder.layers):
            layer.layer_scalar.fill_(1.2 - 0.1 * number)
    return model


@cache
def adapter(calm: bool = False) -> DiffusionGemma:
    """`calm`: layers change little, so that a canvas soon stays what it is."""
    model = hf()
    if calm:
        with torch.no_grad():
            for layer in model.model.decoder.layers:
                layer.post_attention_layernorm.weight.fill_(0.05)
                layer.post_feedforward_layernorm.weight.fill_(0.05)
            model.model.decoder.self_conditioning.down_proj.weight.mul_(0.02)
    return DiffusionGemma(model, "tiny")


@torch.inference_mode()
def ours(model: DiffusionGemma, said: torch.Tensor | None, canvas: list[int]) -> torch.Tensor:
    """Rows of a canvas after the prompt, which is read in pieces."""
    held = model.cache()
    ask = make_look(PROMPT[-1], [*PROMPT, *canvas], range(len(PROMPT), len(PROMPT) + len(canvas)))
    ask.said = said
    whole = False
    pieces = 0
    while not whole:
        job, whole = held.prepare(ask, PROMPT, 4)
        reply = model.forward([job])[0]
        pieces += 1
    assert pieces == 4, "three pieces of the prompt, and the canvas"
    return reply.logits


@torch.inference_mode()
def theirs(model: Any, said: torch.Tensor | None, canvas: list[int]) -> torch.Tensor:
    """The same by transformers, as its generation calls it."""
    encoded = model.model.encoder(input_ids=torch.tensor([PROMPT]))
    out = model(
        decoder_input_ids=torch.tensor([canvas]),
        self_conditioning_logits=None if said is None else said[None],
        past_key_values=encoded.past_key_values,
    )
    rows: torch.Tensor = out.logits[0]
    return rows


def test_rows_are_those_of_transformers() -> None:
    model = adapter()
    canvas = [7, 50, 1, 1, 33, 60]
    torch.manual_seed(1)
    before = torch.zeros(0)
    for said in (None, 3 * torch.randn(CANVAS, 64)):
        rows = ours(model, said, canvas)
        assert torch.allclose(rows, theirs(model.hf, said, canvas), atol=2e-4)
        assert not before.numel() or (rows - before).abs().max() > 1e-2, "what it said counts"
        before = rows


def test_a_text_that_is_read_by_the_decoders_scale_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slip: one stack reads both."""
    model = DiffusionGemma(hf(), "tiny")
    model.encoder = model.decoder
    rows = ours(model, None, [7, 50, 1, 1, 33, 60])
    assert (rows - theirs(model.hf, None, [7, 50, 1, 1, 33, 60])).abs().max() > 1e-2


class Steps:
    """What our loop did: of each canvas the tokens that it read, and what was accepted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.read: list[list[int]] = []
        self.accepted: list[list[int]] = []
        self.starts: list[int] = []  # the steps with which canvases begin
        fill = Renoise.fill_positions

        def noted(method: Renoise, sheet: Any, found: Any, state: Any) -> None:
            if state.steps_left == method.steps:
                self.starts.append(len(self.read))
            self.read.append([sheet.shown[place] for place in found.places])
            fill(method, sheet, found, state)
            self.accepted.append([place - found.places[0] for place in state.accepted])

        monkeypatch.setattr(Renoise, "fill_positions", noted)

    def feed(self, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
        """Gives transformers these canvases and draws; returns what it then accepts."""
        canvases, drawn = [], []
        for start, end in zip(self.starts, [*self.starts[1:], len(self.read)], strict=True):
            # The last step's tokens are drawn too, and nobody reads them.
            steps = [*self.read[start:end], [0] * CANVAS]
            canvases += steps
            drawn += steps[1:]
        noise, tokens = iter(canvases), iter(drawn)
        found: list[list[int]] = []
        accept = EntropyBoundSampler.accept_canvas

        def initialize(sampler: Any, batch_size: int, device: Any) -> torch.Tensor:
            return torch.tensor([next(noise)])

        def multinomial(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
            return torch.tensor(next(tokens))[:, None]

        def noted(sampler: Any, *arguments: Any) -> torch.Tensor:
            canvas = accept(sampler, *arguments)
            found.append(sampler.accepted_token_mask[0].nonzero()[:, 0].tolist())
            return canvas

        monkeypatch.setattr(EntropyBoundSampler, "initialize_canvas", initialize)
        monkeypatch.setattr(EntropyBoundSampler, "accept_canvas", noted)
        monkeypatch.setattr(torch, "multinomial", multinomial)
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
        return found


@pytest.mark.parametrize(
    ("gamma", "steps", "sure", "stable", "temperature"),
    [
        (0.1, 5, 0.005, 1, 1.0),
        (4.0, 6, 0.005, 1, 1.0),
        (8.0, 6, 0.005, 2, 0.7),
        (1e3, 20, 50.0, 1, 0.0),
        (1e3, 6, 50.0, 0, 1.0),
    ],
)
def test_accepted_sets_and_texts_are_those_of_transformers(
    gamma: float,
    steps: int,
    sure: float,
    stable: int,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three canvases, each given the same canvas and draws."""
    seen = Steps(monkeypatch)
    method = f"renoise:gamma={gamma},sure={sure},steps={steps},stable={stable}"
    sampling = {"temperature": temperature, "max_new_tokens": 3 * CANVAS, "seed": 2}
    model = adapter(calm=sure == 50.0)
    tokens = text(model, method, PROMPT, **sampling)
    assert len(seen.starts) == 3 and len(tokens) == 3 * CANVAS
    early = len(seen.read) < 3 * steps
    assert early == (sure == 50.0), "adaptive stopping is put to the test, and its absence"
    found = seen.feed(monkeypatch)
    out = model.hf.generate(
        input_ids=torch.tensor([PROMPT]),
        max_new_tokens=3 * CANVAS,
        max_denoising_steps=steps,
        sampler_config=EntropyBoundSamplerConfig(gamma),
        confidence_threshold=sure,
        stability_threshold=stable,
        eos_token_id=None,
        pad_token_id=None,
    )
    assert out.sequences[0].tolist() == [*PROMPT, *tokens]
    ends = [end - 1 for end in (*seen.starts[1:], len(seen.read))]
    assert len(found) == len(seen.read)
    compared = [n for n in range(len(found)) if n not in ends]  # the last steps accept nothing
    assert [found[n] for n in compared] == [sorted(seen.accepted[n]) for n in compared]
    sizes = {len(found[n]) for n in compared}
    if stable and gamma in (0.1, 1e3):
        assert sizes == ({1} if gamma == 0.1 else {CANVAS})
    elif stable:
        assert len(sizes) > 1, "the bound decides"


def test_requests_side_by_side_are_those_alone() -> None:
    model = adapter()
    prompts = [PROMPT, [4, 2], [30, 31, 32, 33]]
    options = {"temperature": 0.8, "max_new_tokens": 8, "seed": 1}
    engine = Engine({"target": model})
    lives = [engine.add(request(model, "renoise:steps=4", p, **options)) for p in prompts]
    list(engine.run())
    for prompt, live in zip(prompts, lives, strict=True):
        assert live.error is None, live.error
        assert live.ctx.output == text(model, "renoise:steps=4", prompt, **options)


# --- what users meet


@cache
def folder(place: Path) -> Path:
    hf(vocab_size=len(tiny.tokenizer())).save_pretrained(place)
    tiny.tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LM:
    return load(str(folder(tmp_path_factory.mktemp("diffusion-gemma"))), device="cpu")


def test_a_folder_is_loaded_and_generates(lm: LM) -> None:
    answer = lm.generate("The quick", max_new_tokens=9, ignore_eos=True, temperature=1.0)
    again = lm.generate("The quick", "renoise", max_new_tokens=9, ignore_eos=True, temperature=1.0)
    assert answer.tokens == again.tokens and len(answer.tokens) == 9
    pieces = list(lm.stream("The quick", max_new_tokens=9, ignore_eos=True, temperature=1.0))
    assert "".join(piece.text for piece in pieces) == answer.text


def test_gaps_are_filled_and_given_tokens_stay(lm: LM) -> None:
    answer = lm.fill(["The quick", 3, " jumps over", 2], "renoise:steps=4", temperature=1.0)
    given = lm.encode(" jumps over", special=False)
    assert len(answer.tokens) == 5 + len(given) and answer.tokens[3 : 3 + len(given)] == given


def test_what_fills_masks_is_refused_with_the_cure(lm: LM) -> None:
    with pytest.raises(Unsupported, match=r"threshold cannot run on .*fills masks.*'renoise'"):
        lm.generate("The", "threshold")
    with pytest.raises(Unsupported, match=r"fills canvases.*'renoise'"):
        lm.generate("The", "suffix")
    with pytest.raises(Unsupported, match=r"kv=dual cannot run on .*leave kv out"):
        lm.generate("The", "renoise", kv="dual")


def test_a_text_that_is_read_both_ways_is_refused() -> None:
    with pytest.raises(Unsupported, match="read from left to right"):
        DiffusionGemma(hf(use_bidirectional_attention="all"), "tiny")
