"""An LM of models that are in memory: adapters made of transformers models, or given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.api.diagnosis import notice_of_torch
from foretell.api.lm import LM
from foretell.api.prompts import Text
from foretell.core.model import Model
from foretell.core.tokenizer_bytes import related
from foretell.drafters.model import vocabulary as trimming
from foretell.errors import BadConfig, Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def wrap(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft: PreTrainedModel | None = None,
    name: str | None = None,
    path: Path | None = None,
    exact_bits: bool = False,
    models: Mapping[str, PreTrainedModel] | None = None,
    tokenizers: Mapping[str, PreTrainedTokenizerBase | None] | None = None,
) -> LM:
    """An LM over transformers models that are already loaded.

    `models`: others by name, as of `load`; `draft` is short for models={"draft": ...}.
    `tokenizers`: theirs, where they are others than the target's.
    `exact_bits`: as of `load`, for models whose linear layers have 8 bits.
    """
    from foretell.models.decoder.exact import ExactDecoder
    from foretell.models.decoder.fused import blocks
    from foretell.models.decoder.own import own_adapter
    from foretell.models.decoder.pictures import Pictured, reads_pictures
    from foretell.models.diffusion.canvas import check_computed, denoiser, fills_canvases
    from foretell.models.diffusion.diffusion_gemma import KIND, DiffusionGemma
    from foretell.models.encoder_decoder.seq2seq import EncoderDecoder, check_plain
    from foretell.models.recurrent.recurrent import decoder_of

    def build(model: PreTrainedModel, title: str) -> Model:
        if model.config.is_encoder_decoder:
            check_plain(title, exact_bits=exact_bits)
            return EncoderDecoder(model, title)
        if fills_canvases(model.config):
            check_computed(model, title, "auto", exact_bits)
            noise = model.config.model_type == KIND
            return DiffusionGemma(model, title) if noise else denoiser(model, title)
        if reads_pictures(model) and not exact_bits:
            return Pictured(model, title, blocks)
        if exact_bits:
            return own_adapter(model, title, exact_bits) or ExactDecoder(model, title)
        return decoder_of(model, title, blocks)

    if name is None:
        notice_of_torch(hf)
    title = name or getattr(hf.config, "name_or_path", "") or hf.config.model_type
    adapters: dict[str, Model] = {}
    for key, model in named_models(draft, models).items():
        adapters[key] = build(model, f"{title} ({key})")
    return pair(build(hf, title), tokenizer, adapters, path, ends(hf), tokenizers)


def named_models(draft: Any, models: Mapping[str, Any] | None) -> dict[str, Any]:
    """The models besides the target, by name. Raises BadConfig for a wrong or doubled name."""
    named = dict(models or {})
    for name in named:
        if not isinstance(name, str) or not name.isidentifier() or name == "target":
            raise BadConfig(
                f"models: the name {name!r} must be letters, digits and _, and not 'target'"
            )
    if draft is not None and "draft" in named:
        raise BadConfig("draft and models['draft'] name the same model: give one of them")
    return named if draft is None else {"draft": draft, **named}


def pair(
    target: Model,
    tokenizer: PreTrainedTokenizerBase | None,
    models: Mapping[str, Model],
    path: Path | None,
    eos: Sequence[int],
    tokenizers: Mapping[str, PreTrainedTokenizerBase | None] | None = None,
) -> LM:
    """An LM over adapters. Raises BadConfig where the draft model's tokens cannot be the target's,
    and it has no other tokenizer.
    """
    draft = models.get("draft")
    own = (tokenizers or {}).get("draft")
    if draft is not None and (own is None or related(own, tokenizer)):
        needed = max(target.vocab, draft.vocab) if tokenizer is None else len(tokenizer)
        if min(draft.vocab, target.vocab) < needed:
            raise BadConfig(
                f"the draft model has {draft.vocab} tokens and the target {target.vocab}: "
                "they need one tokenizer"
            )
    return LM(target, tokenizer, models, path, eos, tokenizers)


def trim_draft(
    model: Model,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | Path,
    eos: Sequence[int],
) -> Model:
    """The draft model with rows of the tokens in a file of `foretell trim` alone, and of the ends
    `eos`. Raises BadFile, or Unsupported where its head cannot be cut.
    """
    from foretell.drafters.model.trimming import trim
    from foretell.models.decoder.decoder import Decoder

    if not isinstance(model, Decoder):
        raise Unsupported.missing(
            "draft_vocab",
            model.name,
            "a head that is one matrix",
            "load it as a transformers folder, or leave draft_vocab out",
        )
    kept = trimming.load(path)
    kept.check(model.vocab, None if tokenizer is None else Text(tokenizer).decode)
    return trim(model, sorted({*kept.ids, *(token for token in eos if token < model.vocab)}))


def ends(hf: PreTrainedModel) -> list[int]:
    """The ids that end a text."""
    config: Any = hf.config if hf.generation_config is None else hf.generation_config
    ids = config.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
