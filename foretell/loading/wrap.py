"""An LM of models that are in memory: adapters made of transformers models, or given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.api.diagnosis import notice_of_torch
from foretell.api.lm import LM
from foretell.api.prompts import Text
from foretell.core.model import Model
from foretell.core.tokenizer_bytes import are_related
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
    from foretell.models.decoder.fused import fused_blocks
    from foretell.models.decoder.own import own_adapter
    from foretell.models.decoder.pictures import Pictured, reads_pictures
    from foretell.models.diffusion.canvas import build_denoiser, check_computed, fills_canvases
    from foretell.models.diffusion.diffusion_gemma import KIND, DiffusionGemma
    from foretell.models.encoder_decoder.seq2seq import EncoderDecoder, check_plain
    from foretell.models.recurrent.recurrent import decoder_of

    def build(model: PreTrainedModel, model_title: str) -> Model:
        if model.config.is_encoder_decoder:
            check_plain(model_title, exact_bits=exact_bits)
            return EncoderDecoder(model, model_title)
        if fills_canvases(model.config):
            check_computed(model, model_title, "auto", exact_bits)
            is_noise = model.config.model_type == KIND
            return (
                DiffusionGemma(model, model_title)
                if is_noise
                else build_denoiser(model, model_title)
            )
        if reads_pictures(model) and not exact_bits:
            return Pictured(model, model_title, fused_blocks)
        if exact_bits:
            return own_adapter(model, model_title, exact_bits) or ExactDecoder(model, model_title)
        return decoder_of(model, model_title, fused_blocks)

    for model in (hf, *named_models(draft, models).values()):
        if not hasattr(model, "config"):
            raise BadConfig(
                f"wrap: {type(model).__name__} is no model of transformers; write an adapter, a "
                "subclass of foretell.core.model.Model, and give that to foretell.LM"
            )
    if name is None:
        notice_of_torch(hf)
    title = name or getattr(hf.config, "name_or_path", "") or hf.config.model_type
    adapters: dict[str, Model] = {}
    for key, model in named_models(draft, models).items():
        adapters[key] = build(model, f"{title} ({key})")
    return pair_models(build(hf, title), tokenizer, adapters, path, end_tokens_of(hf), tokenizers)


def named_models(draft: Any, models: Mapping[str, Any] | None) -> dict[str, Any]:
    """The models besides the target, by name. Raises BadConfig for a wrong or doubled name."""
    models_by_name = dict(models or {})
    for model_name in models_by_name:
        if (
            not isinstance(model_name, str)
            or not model_name.isidentifier()
            or model_name == "target"
        ):
            raise BadConfig(
                f"models: the name {model_name!r} must be letters, digits and _, and not 'target'"
            )
    if draft is not None and "draft" in models_by_name:
        raise BadConfig("draft and models['draft'] name the same model: give one of them")
    return models_by_name if draft is None else {"draft": draft, **models_by_name}


def pair_models(
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
    draft_model = models.get("draft")
    draft_tokenizer = (tokenizers or {}).get("draft")
    if draft_model is not None and (
        draft_tokenizer is None or are_related(draft_tokenizer, tokenizer)
    ):
        needed_tokens = (
            max(target.vocab, draft_model.vocab) if tokenizer is None else len(tokenizer)
        )
        if min(draft_model.vocab, target.vocab) < needed_tokens:
            raise BadConfig(
                f"the draft model has {draft_model.vocab} tokens and the target {target.vocab}: "
                "they need one tokenizer"
            )
    return LM(target, tokenizer, models, path, eos, tokenizers)


def trim_draft(
    model: Model, tokenizer: PreTrainedTokenizerBase | None, path: str | Path, eos: Sequence[int]
) -> Model:
    """The draft model with rows of the tokens in a file of `foretell trim` alone, and of the ends
    `eos`. Raises BadFile, or Unsupported where its head cannot be cut.
    """
    from foretell.drafters.model.trimming import trim_head
    from foretell.models.decoder.decoder import Decoder

    if not isinstance(model, Decoder):
        raise Unsupported.missing_capability(
            "draft_vocab",
            model.name,
            "a head that is one matrix",
            "load it as a transformers folder, or leave draft_vocab out",
        )
    vocabulary = trimming.load_kept_tokens(path)
    vocabulary.check_model(model.vocab, None if tokenizer is None else Text(tokenizer).decode)
    return trim_head(
        model, sorted({*vocabulary.ids, *(token for token in eos if token < model.vocab)})
    )


def end_tokens_of(hf_model: PreTrainedModel) -> list[int]:
    """The ids that end a text."""
    config: Any = (
        hf_model.config if hf_model.generation_config is None else hf_model.generation_config
    )
    token_ids = config.eos_token_id
    if token_ids is None:
        return []
    return [token_ids] if isinstance(token_ids, int) else list(token_ids)
