"""Whether a folder holds a whole model whose weights can be read, told in one line where not."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from foretell.errors import BadModel, first_line
from foretell.ops.parsing import json_of

ADAPTER = "adapter_config.json"  # of LoRA weights and the like, in PEFT's layout
MERGE = (
    "merge them by peft: AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload()"
    ".save_pretrained(MERGED), and load MERGED"
)
UNPACKED = (
    "name the model with weights of 16 bits, which dtype='int8' or 'int4' packs, or a .gguf file"
)
# Where older tools say how they packed the weights, and how the names of such weights end.
PACKERS = ("quantize_config.json", "quant_config.json")
PACKED = (".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale", ".SCB", ".absmax")


def packed_by(path: Path | None, error: BaseException | None = None) -> str:
    """Who packed a model's weights into few bits in a way of their own ("gptq"), as its folder or
    the error of reading it says; "" where nothing speaks for it.
    """
    for name in ("config.json", *PACKERS) if path is not None else ():
        assert path is not None
        try:
            said = json_of((path / name).read_text("utf-8"))
            found = said if name in PACKERS else said["quantization_config"]
            return str(found.get("quant_method", name.partition("_")[0]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return "a quantiser" if error is not None and "quantiz" in str(error).lower() else ""


def cure_of(error: Exception, path: Path | None) -> str:
    """What helps where transformers could not load a model from this folder; None: the hub."""
    if "trust_remote_code" in str(error):
        return "pass trust_remote_code=True if you trust its code"
    if packer := packed_by(path, error):
        return f"its weights are packed by {packer}: {UNPACKED}"
    return "check the folder's files" if path else "check the id, or give a local folder"


def check_files(path: Path) -> None:
    """Raises BadModel where a folder does not hold a whole model in safetensors."""
    if (path / ADAPTER).is_file():
        raise BadModel(f"{path}: holds weights that are added to a model's; {MERGE}")
    if not (path / "config.json").is_file():
        raise BadModel(f"{path}: has no config.json, so it is no transformers model folder")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = [p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        what = "no weights"
        if others:
            what = f"only {', '.join(others[:3])}, which can run code when read"
        raise BadModel(
            f"{path}: holds {what}; foretell reads safetensors: convert with save_pretrained()"
        )
    for index in sorted(path.glob("*.safetensors.index.json")):
        try:
            shards = set(json_of(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadModel(f"{index}: damaged ({first_line(error)}); fetch it again") from error
        missing = sorted(shards - {file.name for file in files})
        if missing:
            raise BadModel(
                f"{path}: lacks {', '.join(missing[:3])} of {len(shards)} shards; fetch them again"
            )
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise BadModel(
                f"{file}: damaged or cut off ({first_line(error)}); fetch it again"
            ) from error


def check_tokenizer(path: Path) -> None:
    """Raises BadModel where a folder has files of a tokenizer that are damaged: ids alone would
    still work, and the user would be told that there is no tokenizer.
    """
    from tokenizers import Tokenizer

    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        file = path / name
        if not file.is_file():
            continue
        try:
            told = json_of(file.read_bytes())
            if not isinstance(told, dict):
                raise ValueError("it is no object")
            if name == "tokenizer.json":
                Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing more special
            raise BadModel(f"{file}: damaged ({first_line(error)}); fetch it again") from error
