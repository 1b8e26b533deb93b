"""From a name to a model: the embedded pair, a folder, a hub id, or a .gguf file, which llama.cpp
runs.

Weights are read from safetensors or GGUF only; remote code runs only when asked for.

Nothing here computes; every way a folder can be wrong ends in one BadModel line that says what,
where and the cure.
"""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from foretell.api import LM, ends, pair
from foretell.core.model import Model
from foretell.errors import BadConfig, BadModel, Unsupported
from foretell.families.int8 import quantize
from foretell.runtimes import registry

if (
    TYPE_CHECKING
):  # transformers' models and tokenizers fill 100 MB, which a .gguf file needs none of
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretell.families.decoder import Decoder

ASSETS = Path(__file__).parent / "assets"
DEVICES = {"cpu": "a CPU", "cuda": "a CUDA GPU, whose graphs record the steps"}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def load(
    source: str | Path = "demo",
    *,
    draft: str | Path | None = None,
    device: str | None = None,
    dtype: str = "auto",
    exact_bits: bool = False,
    executor: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LM:
    """Loads a model: `demo`, a folder in transformers' layout, a hub id, or a .gguf file. `draft`:
    a smaller relative.

    `demo` brings its own draft model. `dtype`: float32, bfloat16, float16, float64, int8 (weights
    of linear layers, on a CPU; the rest bfloat16, or float32 where onnxruntime computes it), or
    auto: as stored. `executor`: what computes ordinary steps, torch, openvino (CPUs only),
    onnxruntime (CPUs only, int8 and float32; what others do quicker it leaves to openvino), graphs
    (torch's operations recorded as CUDA graphs; CUDA GPUs only), or auto: onnxruntime for small
    models in int8, openvino for others on a CPU, where they are installed, and graphs on a CUDA
    GPU, each where it takes the model, else torch. `exact_bits`: logits equal to the last bit in
    any tree, batch and chunking; int8, on a CPU, by torch. A .gguf file runs in llama.cpp, on the
    CPU and in the formats it has; with an executor by name its weights are unpacked for that, auto:
    to bfloat16. Raises BadModel, BadConfig or Unsupported.
    """
    name = str(source)
    if name == "demo" and draft is None:
        draft = "demo-draft"
    if _is_gguf(name) and revision is not None:
        raise Unsupported.missing(f"revision={revision!r}", name, "a hub id", "leave revision out")
    packed = _is_gguf(name) and executor == "auto"  # for llama.cpp
    if packed:
        _check_gguf(name, device, dtype, exact_bits)
        device, dtype = "cpu", "auto"  # from here on of the draft model, where that is none
    if dtype not in ("auto", "int8", *DTYPES):
        raise BadConfig.field("dtype", dtype, f"one of auto, int8, {', '.join(DTYPES)}")
    executors = ("auto", "torch", *registry.names())
    if executor not in executors:
        raise BadConfig.field("executor", executor, f"one of {', '.join(executors)}")
    if exact_bits:
        if dtype not in ("auto", "int8"):
            raise BadConfig(
                f"dtype={dtype!r} with exact_bits=True: must be auto or int8, whose sums are exact"
            )
        if executor not in ("auto", "torch"):
            raise BadConfig(
                f"executor={executor!r} with exact_bits=True: must be auto or torch, which computes it"
            )
        dtype, executor = "int8", "torch"
    if device is None:
        device = "cuda" if torch.cuda.is_available() and not exact_bits else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadConfig(f"device={device!r} cannot be used here: {_line(error)}") from error
    if dtype == "int8" and torch.device(device).type != "cpu":
        raise Unsupported.missing(
            "dtype='int8'", name, "a CPU", "use bfloat16 there, or device='cpu'"
        )
    if executor not in ("auto", "torch"):
        where = registry.device_of(executor)
        if torch.device(device).type != where:
            need = DEVICES.get(where, f"a device of type {where}")
            raise Unsupported.missing(
                f"executor={executor!r}", f"device={device!r}", need, "leave executor out"
            )
    path: Path | None
    if packed:
        target: Any = _gguf(name)
        path, tokenizer, eos = target.path, target.tokenizer, target.tokenizer.ends
    else:
        tokenizer = load_tokenizer(name) if _is_gguf(name) else None
        hf, path = _model(name, dtype, device, revision, trust_remote_code)
        if tokenizer is None:
            tokenizer = _tokenizer(path or name, revision, trust_remote_code)
        target, eos = (
            _decoder(hf, name, exact_bits, executor),
            getattr(tokenizer, "ends", None) or ends(hf),
        )
    second: Model | None = None
    if draft is not None and _is_gguf(str(draft)):
        second = _gguf(str(draft))
    elif draft is not None:
        draft_hf = _model(str(draft), dtype, device, None, trust_remote_code)[0]
        second = _decoder(draft_hf, f"{name} (draft)", exact_bits, executor)
    return pair(target, tokenizer, second, path, eos)


def _decoder(hf: PreTrainedModel, name: str, exact_bits: bool, executor: str) -> Model:
    """Its adapter, and who computes its steps."""
    from foretell.families.decoder import Decoder
    from foretell.families.exact import ExactDecoder
    from foretell.families.fused import blocks

    if exact_bits:
        return ExactDecoder(hf, name)
    if executor != "torch":
        for candidate, runtime in registry.candidates(hf, hf.device.type, executor):
            if runtime.DTYPE is not None and runtime.suits(hf, candidate == executor):
                hf = hf.to(runtime.DTYPE)  # what has no weights of 8 bits
    model = Decoder(hf, name, partial(blocks, ours=True))
    if executor != "torch":
        _hand_over(model, executor)
    return model


def _hand_over(model: Decoder, executor: str) -> None:
    """Lets executors compute its steps, each the next one's fallback; where none can, torch does,
    or it is an error if it was asked for by name.
    """
    for name, runtime in registry.candidates(model.hf, model.device.type, executor):
        try:
            model.use(partial(runtime.make, fallback=model.executor))
        except LookupError as error:
            if executor == name:
                need = f"what it takes ({error})"
                raise Unsupported.missing(
                    f"executor={executor!r}", model.name, need, "use torch"
                ) from error
    if model.executor is not None and model.executor.fallback is not None:
        model.executor.fallback.release()  # of what only the probe asked it for


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf") and not Path(name).is_dir()


def _gguf(name: str) -> Any:
    from foretell.runtimes.llama_cpp import GGUF  # llama.cpp is an optional package

    return GGUF(Path(name).expanduser())


def _check_gguf(name: str, device: str | None, dtype: str, exact_bits: bool) -> None:
    """Refuses by name what has no meaning for a file that llama.cpp runs."""
    cure = "leave it out, or name an executor (torch, openvino), for which the weights are unpacked"
    if device not in (None, "cpu"):
        raise Unsupported.missing(
            f"device={device!r}", name, "another runtime: llama.cpp's is on the CPU here", cure
        )
    if dtype != "auto":
        raise Unsupported.missing(
            f"dtype={dtype!r}", name, "weights in that format, and the file has its own", cure
        )
    if exact_bits:
        need = "batch-invariant kernels, which llama.cpp's are not"
        raise Unsupported.missing("exact_bits=True", name, need, cure)


def load_tokenizer(
    source: str | Path = "demo", revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer alone, of what `load` takes; code that comes with it is never run. Raises
    BadModel.
    """
    name = str(source)
    if _is_gguf(name):
        from foretell.runtimes.vocabulary import load_vocabulary

        return load_vocabulary(Path(name).expanduser())
    from transformers import AutoTokenizer

    path = _folder(name)
    try:
        return AutoTokenizer.from_pretrained(
            path or name, revision=revision, trust_remote_code=False
        )  # type: ignore[no-any-return]
    except Exception as error:  # transformers raises nearly anything here
        raise BadModel(
            f"{name}: no usable tokenizer ({_line(error)}); give `demo`, a folder with tokenizer.json or "
            "a hub id"
        ) from error


def _folder(name: str) -> Path | None:
    """The local folder a name means, checked; None: it is a hub id."""
    if name in ("demo", "demo-draft"):
        return ASSETS / name
    path = Path(name).expanduser()
    if path.is_file():
        raise BadModel(
            f"{name}: a file; give the folder that holds config.json and the .safetensors files, or a .gguf file"
        )
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise BadModel(
            f"{name}: no such folder; give `demo`, a folder with config.json, or a hub id like owner/name"
        )
    return None


def _check_files(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise BadModel(f"{path}: has no config.json, so it is no transformers model folder")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = [p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        what = (
            f"only {', '.join(others[:3])}, which can run code when read"
            if others
            else "no weights"
        )
        raise BadModel(
            f"{path}: holds {what}; foretell reads safetensors: convert with save_pretrained()"
        )
    for index in sorted(path.glob("*.safetensors.index.json")):
        try:
            shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadModel(f"{index}: damaged ({_line(error)}); fetch it again") from error
        if missing := sorted(shards - {file.name for file in files}):
            raise BadModel(
                f"{path}: lacks {', '.join(missing[:3])} of {len(shards)} shards; fetch them again"
            )
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise BadModel(
                f"{file}: damaged or cut off ({_line(error)}); fetch it again"
            ) from error


def _line(error: Exception) -> str:
    """What it says, in one line."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def _model(
    name: str, dtype: str, device: str, revision: str | None, remote: bool
) -> tuple[PreTrainedModel, Path | None]:
    from transformers import AutoModelForCausalLM, GgufConfig

    path = None if _is_gguf(name) else _folder(name)
    if path is not None:
        _check_files(path)
    kind = (
        torch.bfloat16 if dtype == "int8" else DTYPES.get(dtype, "auto")
    )  # of what is not a linear layer's weights
    options: dict[str, Any] = {"dtype": kind, "use_safetensors": True, "trust_remote_code": remote}
    place: str | Path = path or name
    if _is_gguf(name):
        path = Path(name).expanduser()
        place, kind = path.parent, torch.bfloat16 if dtype == "auto" else kind
        options = {
            "dtype": kind,
            "gguf_file": path.name,
            "quantization_config": GgufConfig(dequantize=True),
        }
    elif path is None:
        options["revision"] = revision
    try:
        hf, report = AutoModelForCausalLM.from_pretrained(
            place, output_loading_info=True, **options
        )
    except Exception as error:  # transformers raises nearly anything here
        where = (
            "check the folder's files"
            if path
            else "check the id and the connection, or give a local folder"
        )
        if _is_gguf(name):
            where = "leave executor out, and llama.cpp runs it"
        if "trust_remote_code" in str(error):
            where = "pass trust_remote_code=True if you trust its code"
        raise BadModel(f"{name}: cannot be loaded ({_line(error)}); {where}") from error
    # What a file lacks transformers makes up at random, and what it does not know it leaves out:
    # both with a warning.
    for kind, meaning in (
        ("missing_keys", "lack"),
        ("unexpected_keys", "have, and its configuration does not,"),
    ):
        if keys := sorted(report[kind]):
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise BadModel(
                f"{name}: the weights {meaning} {', '.join(keys[:3])}{more}; "
                "config.json and the .safetensors files do not belong together"
            )
    if dtype == "int8" and not quantize(hf):
        raise Unsupported.missing("dtype='int8'", name, "torch's linear layers", "use bfloat16")
    return hf.to(device).eval(), path


def _tokenizer(
    source: str | Path, revision: str | None, remote: bool
) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None with a warning: token ids still work."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=remote)  # type: ignore[no-any-return]
    except (
        Exception
    ) as error:  # transformers raises nearly anything here; the model itself is usable without it
        warnings.warn(
            f"{source}: no usable tokenizer ({_line(error)}); prompts must be token ids",
            stacklevel=3,
        )
        return None
