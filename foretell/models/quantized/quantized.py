"""A model read from a folder whose matrices are in few bits: packed as they are, or unpacked where
the user asks for another number format.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadModel, ForetellError, first_message_line
from foretell.models.decoder.packed import PackedLinear
from foretell.models.quantized.filling import Filler, pack_matrix, plain_matrix
from foretell.models.quantized.format import CURE, Settings, find_format
from foretell.models.quantized.tensors import Tensors
from foretell.ops.parsing import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What older tools wrote beside config.json, by the method whose it is.
OLDER = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def find_settings(folder: Path) -> Settings | None:
    """What a folder says of its quantization; None: nothing. Raises BadModel for what is no object.

    A config.json that is damaged says nothing here: who reads it next says so.
    """
    fields: Any = None
    with suppress(OSError, ValueError, AttributeError):
        raw_settings = parse_json((folder / "config.json").read_text("utf-8"))
        fields = raw_settings.get("quantization_config")
    where = f"{folder}: quantization_config"
    if fields is None:
        file_name = next((name for name in OLDER if (folder / name).is_file()), None)
        if file_name is None:
            return None
        where = str(folder / file_name)
        try:
            fields = parse_json((folder / file_name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise BadModel(f"{where}: damaged ({first_message_line(error)})") from error
        if isinstance(fields, dict):
            fields = {"quant_method": OLDER[file_name], **fields}
    if not isinstance(fields, dict):
        raise BadModel(f"{where} is no object; {CURE}")
    return Settings(fields, where)


def read_quantized(
    folder: Path, settings: Settings, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model in a folder with these settings, with packed matrices; `dtype`: with plain ones of
    this format. Raises BadModel with the reason where it cannot be read.
    """
    reader = find_format(settings)
    make_layer = pack_matrix if dtype is None else partial(plain_matrix, dtype=dtype)
    try:
        hf_model = _empty_model(folder)
        filler = Filler(Tensors(folder), reader, make_layer)
        filler.fill_model(hf_model)
    except ForetellError:
        raise
    except Exception as error:  # configurations of transformers raise nearly anything
        reason = error if type(error) is LookupError else first_message_line(error)
        raise BadModel(f"{folder}: cannot be read ({reason}); {CURE}") from error
    if not filler.packed_count:
        method = settings.get("quant_method")
        raise BadModel(
            f"{folder}: config.json says {method}, and no matrix is of it; if its weights are "
            "floats, take quantization_config out of config.json"
        )
    _settle_format(hf_model, dtype)
    return hf_model.eval()  # type: ignore[no-any-return]


def _empty_model(folder: Path) -> Any:
    """The model that config.json describes, its numbers not in memory."""
    from accelerate import init_empty_weights
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise LookupError(f"quantized models of {config.model_type} are not read here, only texts'")
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        hf_model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return hf_model


def _settle_format(hf_model: Any, dtype: torch.dtype | None) -> None:
    """Brings what is no packed matrix into one format: `dtype`, or bfloat16 where that holds all of
    it, else float32.
    """
    packed = [module for module in hf_model.modules() if isinstance(module, PackedLinear)]
    if dtype is None:
        biases = [layer.bias for layer in packed if layer.bias is not None]
        numbers = [*hf_model.parameters(), *biases]
        is_exact = all(torch.equal(n.bfloat16().float(), n.float()) for n in numbers)
        dtype = torch.bfloat16 if is_exact else torch.float32
    for layer in packed:
        layer.bias = None if layer.bias is None else layer.bias.to(dtype)
    hf_model.to(dtype)
