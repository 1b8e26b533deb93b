"""Whether a folder holds a whole model whose weights can be read, told in one line where not."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from foretell.errors import BadModel, first_message_line
from foretell.ops.parsing import parse_json

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


def packed_by(folder: Path | None, error: BaseException | None = None) -> str:
    """Name of the library that packed a model's weights into few bits ("gptq"), as its folder or
    the error of reading it says; "" where nothing speaks for it.
    """
    for file_name in ("config.json", *PACKERS) if folder is not None else ():
        assert folder is not None
        try:
            contents = parse_json((folder / file_name).read_text("utf-8"))
            quantization = contents if file_name in PACKERS else contents["quantization_config"]
            return str(quantization.get("quant_method", file_name.partition("_")[0]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return "a quantiser" if error is not None and "quantiz" in str(error).lower() else ""


def cure_of(error: Exception, folder: Path | None) -> str:
    """Advice where transformers could not load a model from this folder; None: the hub."""
    if "trust_remote_code" in str(error):
        return "pass trust_remote_code=True if you trust its code"
    if packer_name := packed_by(folder, error):
        return f"its weights are packed by {packer_name}: {UNPACKED}"
    return "check the folder's files" if folder else "check the id, or give a local folder"


def check_files(folder: Path) -> None:
    """Raises BadModel where a folder does not hold a whole model in safetensors."""
    if (folder / ADAPTER).is_file():
        raise BadModel(f"{folder}: holds weights that are added to a model's; {MERGE}")
    if not (folder / "config.json").is_file():
        raise BadModel(f"{folder}: has no config.json, so it is no transformers model folder")
    weight_files = sorted(folder.glob("*.safetensors"))
    if not weight_files:
        other_names = [
            file_path.name
            for file_path in folder.iterdir()
            if file_path.suffix in (".bin", ".pt", ".pth", ".ckpt")
        ]
        contents = "no weights"
        if other_names:
            contents = f"only {', '.join(other_names[:3])}, which can run code when read"
        raise BadModel(
            f"{folder}: holds {contents}; foretell reads safetensors: convert with "
            "save_pretrained()"
        )
    for index_file in sorted(folder.glob("*.safetensors.index.json")):
        try:
            shards = set(parse_json(index_file.read_text("utf-8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadModel(
                f"{index_file}: damaged ({first_message_line(error)}); fetch it again"
            ) from error
        missing_shards = sorted(shards - {weight_file.name for weight_file in weight_files})
        if missing_shards:
            raise BadModel(
                f"{folder}: lacks {', '.join(missing_shards[:3])} of {len(shards)} shards; fetch "
                "them again"
            )
    for weight_file in weight_files:
        try:
            with safe_open(weight_file, "pt") as open_weights:
                open_weights.keys()
        except (SafetensorError, OSError) as error:
            raise BadModel(
                f"{weight_file}: damaged or cut off ({first_message_line(error)}); fetch it again"
            ) from error


def check_tokenizer(folder: Path) -> None:
    """Raises BadModel where a folder has files of a tokenizer that are damaged: ids alone would
    still work, and the user would be told that there is no tokenizer.
    """
    from tokenizers import Tokenizer

    for file_name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        file_path = folder / file_name
        if not file_path.is_file():
            continue
        try:
            contents = parse_json(file_path.read_bytes())
            if not isinstance(contents, dict):
                raise ValueError("it is no object")
            if file_name == "tokenizer.json":
                Tokenizer.from_file(str(file_path))
        except Exception as error:  # tokenizers raises nothing more special
            raise BadModel(
                f"{file_path}: damaged ({first_message_line(error)}); fetch it again"
            ) from error
