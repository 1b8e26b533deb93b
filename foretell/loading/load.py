"""From a name to a model: the embedded pair, a known name, a folder, a hub id or a .gguf file.

Weights are read from safetensors or GGUF only; remote code runs only when asked for. Every way a
folder can be wrong ends in one BadModel line that says what, where and the cure.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretell.api.diagnosis import notice_of_missing_head, notice_refusals
from foretell.api.lm import LM
from foretell.core.model import Model
from foretell.core.renamed_options import takes_old_names
from foretell.engine.remote import model_recipe
from foretell.errors import BadConfig, BadModel, ForetellWarning, Unsupported, first_message_line
from foretell.loading import packed_models
from foretell.loading.choosing import Refusals, hand_over, note_refusal, whole_adapter
from foretell.loading.fetch import ask_hub, fetch_quantized, fetch_shipped, resolve
from foretell.loading.names import EMBEDDED, aliases, suggest_names, text_of_source
from foretell.loading.tokenizers import find_tokenizer
from foretell.loading.wrap import end_tokens_of, named_models, pair_models, trim_draft
from foretell.models import backend_registry as registry
from foretell.models.decoder.packed import WHOLE_NUMBERS
from foretell.models.weights import check_files, cure_of
from foretell.native import library
from foretell.ops.devices import check_device
from foretell.ops.memory import trim_memory
from foretell.ops.threads import library_alone

if TYPE_CHECKING:
    # Not imported for a .gguf file, which needs none of transformers' models: they fill 100 MB.
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEVICES = {"cpu": "a CPU", "cuda": "a CUDA GPU, whose graphs record the steps"}
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
OWN_VOCAB = "draft_vocab.json"
LLAMA_CPP = "llama.cpp"  # the backend of .gguf files alone


@dataclass
class _Loaded:
    """A model with what came along."""

    model: Model
    path: Path | None
    tokenizer: PreTrainedTokenizerBase | None
    eos: list[int]
    refusals: Refusals = ()
    trouble: str = ""  # why there is no tokenizer


@dataclass
class _Options:
    """How every model of one `load` is computed."""

    device: str
    dtype: str
    exact_bits: bool
    backend: str
    trust_remote_code: bool


@takes_old_names
def load(
    source: str | Path = "demo",
    *,
    draft: str | Path | None = None,
    models: Mapping[str, str | Path] | None = None,
    draft_vocab: str | Path | None = None,
    device: str | None = None,
    dtype: str = "auto",
    exact_bits: bool = False,
    backend: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LM:
    """Loads a model: `demo`, a name that `foretell fetch` lists, which is fetched where it is not
    here, a folder in transformers' layout, a hub id or a .gguf file. Raises ForetellError.

    `models`: other models that methods ask, by name, loaded in the same way; they are in
    `lm.models` and their tokenizers in `lm.tokenizers`. `draft` is short for models={"draft": ...},
    a smaller relative with the target's tokens; `demo` brings its own. `draft_vocab`: a file that
    `foretell trim` wrote; the draft model then computes the rows of its tokens only. So it does
    where its own folder holds such a file, OWN_VOCAB.

    `dtype`: float32, bfloat16, float16, float64, int8 or int4 (weights of linear layers, in groups
    of 32, on a CPU; the rest bfloat16, or float32 where onnxruntime computes it and beside
    recurrent layers), or auto: as stored.

    `backend`: what computes ordinary steps: torch, native (the C library: weights of bfloat16, int8
    and int4 on CPUs), openvino (CPUs only), onnxruntime (CPUs only, int8 and int4; what others do
    quicker it leaves to openvino), graphs (torch's operations recorded as CUDA graphs; CUDA GPUs
    only), or auto: the first of native, onnxruntime and openvino that takes the model on a CPU, and
    graphs on a CUDA GPU, else torch. Where one that auto prefers does not take it, a line on stderr
    says so.

    `exact_bits`: refuses what cannot promise logits that are equal to the last bit in any tree,
    batch and chunking. native promises it always, so there drafts never change a token; other
    models have it by torch with dtype int8 or int4.

    A folder whose weights others have put into few bits (GPTQ, AWQ, compressed-tensors,
    bitsandbytes, MXFP4, FP8) runs in these on a CPU, with dtype auto; with any other its weights
    are unpacked and then rounded to that.

    A .gguf file runs in the formats it has, on the CPU: those of 8, 4 and 16 bits of the llama
    family and of LFM 2 by the C library, others by llama.cpp (backend "llama.cpp" for all). With
    another backend by name its weights are unpacked for that, auto: to bfloat16.
    """
    name = text_of_source(source)
    resolved = resolve(name)  # the same, or the folder or file that a known name stands for
    other_names = {key: resolve(str(value)) for key, value in named_models(draft, models).items()}
    if name == "demo":
        other_names = {"draft": "demo-draft", **other_names}
    if draft_vocab is not None and "draft" not in other_names:
        raise BadConfig(f"draft_vocab={str(draft_vocab)!r}: there is no draft model; give draft=")
    if revision is not None and (_is_gguf(name) or resolved != name):
        raise Unsupported.missing_capability(
            f"revision={revision!r}", name, "a hub id", "leave revision out"
        )
    options = check_options(name, dtype, backend, device, exact_bits, trust_remote_code)
    if _runs_as_file(resolved, dtype, backend):
        target = _load_gguf(resolved, name, backend, exact_bits)
    else:
        target = _load_model(resolved, name, options, revision)
    if target.trouble:
        message = f"no usable tokenizer ({target.trouble}); prompts must be token ids"
        warnings.warn(f"{target.path or name}: {message}", ForetellWarning, stacklevel=3)
    helpers = {
        key: _load_gguf(path) if _is_gguf(path) else _load_model(path, f"{name} ({key})", options)
        for key, path in other_names.items()
    }
    draft_model = helpers.get("draft")
    vocab_file = draft_vocab or _own_vocab(draft_model)
    if vocab_file is not None and draft_model is not None:
        text_tokenizer = draft_model.tokenizer or target.tokenizer
        draft_model.model = trim_draft(draft_model.model, text_tokenizer, vocab_file, target.eos)
    trim_memory()
    lm = pair_models(
        target.model,
        target.tokenizer,
        {key: other_model.model for key, other_model in helpers.items()},
        target.path,
        target.eos,
        {key: other_model.tokenizer for key, other_model in helpers.items()},
    )
    for key, path in {"target": resolved, **other_names}.items():
        own_revision = revision if key == "target" else None
        lm.models[key].recipe = model_recipe(path, revision=own_revision, **vars(options))
    lm.refusals = {key: loaded.refusals for key, loaded in {"target": target, **helpers}.items()}
    notice_refusals(lm, name)
    if resolved != name:
        notice_of_missing_head(name, aliases()[name].head)
    return lm


def _own_vocab(draft: _Loaded | None) -> Path | None:
    """The file in a draft model's folder that says which tokens its head is to keep."""
    vocab_path = None if draft is None or draft.path is None else Path(draft.path) / OWN_VOCAB
    return vocab_path if vocab_path is not None and vocab_path.is_file() else None


def _runs_as_file(source_name: str, dtype: str, backend: str) -> bool:
    """Whether a .gguf file is run in its own formats."""
    is_native = backend == "native" and dtype == "auto"
    return _is_gguf(source_name) and (backend in ("auto", LLAMA_CPP) or is_native)


def check_options(
    name: str,
    dtype: str = "auto",
    backend: str = "auto",
    device: str | None = None,
    exact_bits: bool = False,
    trust_remote_code: bool = False,
) -> _Options:
    """The options of `load` with what they stand for, those of the other models where the target is
    a .gguf file; nothing is loaded. Raises BadConfig or Unsupported for wrong ones.
    """
    if _runs_as_file(resolve(name), dtype, backend):
        _check_gguf(name, device, dtype)
        device, backend = "cpu", "auto"
    dtypes = ("auto", *WHOLE_NUMBERS, *DTYPES)
    if dtype not in dtypes:
        raise BadConfig.field("dtype", dtype, f"one of {', '.join(dtypes)}")
    backends = ("auto", "torch", *registry.backend_names())
    if backend not in backends:
        raise BadConfig.field("backend", backend, f"one of {', '.join(backends)}")
    if exact_bits:
        if dtype not in ("auto", "bfloat16", *WHOLE_NUMBERS):
            raise BadConfig(
                f"dtype={dtype!r} with exact_bits=True: must be auto, bfloat16, int8 or int4, "
                "whose products are our own"
            )
        if backend not in ("auto", "native", "torch"):
            raise BadConfig(
                f"backend={backend!r} with exact_bits=True: must be auto, native or torch, "
                "which compute it"
            )
        if dtype == "auto" and (backend == "torch" or not library.is_available()):
            dtype = "int8"
    if device is None:
        needs_cpu = exact_bits or dtype in WHOLE_NUMBERS
        device = "cuda" if torch.cuda.is_available() and not needs_cpu else "cpu"
    check_device(device)
    device_type = torch.device(device).type
    if dtype in WHOLE_NUMBERS and device_type != "cpu":
        raise Unsupported.missing_capability(
            f"dtype={dtype!r}", name, "a CPU", "use bfloat16 there, or device='cpu'"
        )
    if backend not in ("auto", "torch"):
        backend_device = registry.device_of(backend)
        if device_type != backend_device:
            need = DEVICES.get(backend_device, f"a device of type {backend_device}")
            raise Unsupported.missing_capability(
                f"backend={backend!r}", f"device={device!r}", need, "leave backend out"
            )
    return _Options(device, dtype, exact_bits, backend, trust_remote_code)


def _load_model(name: str, title: str, options: _Options, revision: str | None = None) -> _Loaded:
    """A transformers model with its tokenizer; `name` may be a .gguf file to be unpacked."""
    if _is_gguf(name):
        file_tokenizer = load_tokenizer(name)
        hf, file_path = _unpack_gguf(name, options)
        model, refusals = _build_adapter(hf, title, options)
        return _Loaded(model, file_path, file_tokenizer, end_tokens_of(hf), refusals)
    hf, folder = _read_model(name, options, revision)
    tokenizer = find_tokenizer(folder or name, revision, options.trust_remote_code)
    model, refusals = _build_adapter(hf, title, options)
    loaded = _Loaded(model, folder, None, end_tokens_of(hf), refusals)
    if isinstance(tokenizer, str):
        loaded.trouble = tokenizer
    else:
        loaded.tokenizer = tokenizer
    return loaded


def _build_adapter(hf: PreTrainedModel, title: str, options: _Options) -> tuple[Model, Refusals]:
    """Makes the adapter, computed by what `options.backend` says, and says who refused it."""
    from foretell.models.decoder.decoder import Decoder
    from foretell.models.decoder.exact import ExactDecoder
    from foretell.models.decoder.fused import fused_blocks
    from foretell.models.decoder.own import own_adapter
    from foretell.models.decoder.pictures import Pictured, reads_pictures
    from foretell.models.diffusion.canvas import build_denoiser, check_computed, fills_canvases
    from foretell.models.diffusion.diffusion_gemma import KIND, DiffusionGemma
    from foretell.models.encoder_decoder.seq2seq import EncoderDecoder
    from foretell.models.recurrent.recurrent import recurrent_adapter

    if hf.config.is_encoder_decoder:
        return EncoderDecoder(hf, title), ()
    if fills_canvases(hf.config):
        check_computed(hf, title, options.backend, options.exact_bits)
        if hf.config.model_type == KIND:
            return DiffusionGemma(hf, title), ()
        build = partial(build_denoiser, hf, title)
        filler, refusals = whole_adapter(build, hf, title, options.backend)
        return filler or build_denoiser(hf, title), refusals
    is_plain = options.backend in ("auto", "torch") and not options.exact_bits
    if is_plain and reads_pictures(hf):
        return Pictured(hf, title, partial(fused_blocks, owns_weights=True)), ()
    for make_adapter in (own_adapter, recurrent_adapter):
        model = make_adapter(hf, title, options.exact_bits, options.dtype, options.backend)
        if model is not None:
            return model, ()
    device_type = hf.device.type
    make_decoder = partial(Decoder, hf, title, partial(fused_blocks, owns_weights=True))
    decoder, refusals = whole_adapter(make_decoder, hf, title, options.backend)
    if decoder is not None:
        return decoder, refusals
    if options.exact_bits:
        if options.dtype in WHOLE_NUMBERS:
            return ExactDecoder(hf, title), ()
        why = "; ".join(reason for _, reason in refusals) or "products of its own for this model"
        raise Unsupported.missing_capability("exact_bits=True", title, why, "use dtype='int8'")
    if options.backend != "torch":
        for candidate, module in registry.candidate_backends(hf, device_type, options.backend):
            if module.DTYPE is not None and module.suits_model(hf, candidate == options.backend):
                hf = hf.to(module.DTYPE)  # what has no weights of 8 bits
    model = make_decoder()
    if options.backend != "torch":
        refusals += hand_over(model, options.backend)
    if model.backend is None and not model.fused and options.backend in ("auto", "torch"):
        why = model.blocks_refused or "its layers are of another build than the llama family's"
        refusals += (("fused blocks", why),)
    return model, refusals


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf") and not Path(name).is_dir()


def _load_gguf(path: str, title: str = "", backend: str = "auto", exact: bool = False) -> _Loaded:
    """Loads a .gguf file in its own formats: by the C library if it can, else by llama.cpp."""
    from foretell.backends import llama_cpp
    from foretell.models.gguf import limits as gguf_limits

    refusals: Refusals = ()
    file_path, title = Path(path).expanduser(), title or path
    if backend != LLAMA_CPP:
        gguf_limits.check_file(file_path)
        try:
            return _native_gguf(title, file_path, backend, exact)
        except LookupError as error:
            refusals = note_refusal(title, "native", error, backend)
    if exact:
        need = "batch-invariant kernels, which llama.cpp's are not"
        cure = "leave it out, or name a backend (torch, openvino) and dtype='int8'"
        raise Unsupported.missing_capability("exact_bits=True", title, need, cure)
    try:
        model: Any = llama_cpp.GGUF(file_path)
    except Unsupported as error:
        reasons = "".join(f"; {backend} does not take it: {why}" for backend, why in refusals)
        raise Unsupported(f"{error}{reasons}") from error
    return _Loaded(model, model.path, model.tokenizer, model.tokenizer.ends, refusals)


def _native_gguf(title: str, file_path: Path, backend: str, exact: bool) -> _Loaded:
    """Loads matrices as they lie in the file. Raises LookupError where the C library cannot, and
    Unsupported for options that a model with recurrent layers has no meaning for.
    """
    from foretell.models.decoder.decoder import Decoder
    from foretell.models.decoder.fused import fused_blocks
    from foretell.models.gguf import gguf
    from foretell.models.gguf.tokenizer import read_tokenizer
    from foretell.models.recurrent.recurrent import recurrent_adapter

    place = packed_models.place_of_file(file_path)
    kept = place.find()
    hf = kept or gguf.read_packed(file_path)
    try:
        tokenizer = read_tokenizer(file_path)
    except BadModel as error:
        raise LookupError(str(error)) from error
    with library_alone():
        model: Decoder | None = recurrent_adapter(hf, title, exact, "auto", backend)
        if model is None:
            model = Decoder(hf, title, partial(fused_blocks, owns_weights=True))
            model.use(registry.load_backend("native").make_backend)
    if kept is None:
        place.keep(hf)
    return _Loaded(model, file_path, tokenizer, end_tokens_of(hf))


def _check_gguf(name: str, device: str | None, dtype: str) -> None:
    """Refuses by name what has no meaning for a file that is run in its own formats."""
    cure = "leave it out, or name a backend (torch, openvino), for which the weights are unpacked"
    if device not in (None, "cpu"):
        need = "another backend: those for its formats are on the CPU"
        raise Unsupported.missing_capability(f"device={device!r}", name, need, cure)
    if dtype != "auto":
        raise Unsupported.missing_capability(
            f"dtype={dtype!r}", name, "weights in that format, and the file has its own", cure
        )


def load_tokenizer(
    source: str | Path = "demo", revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of what `load` takes; code that comes with it never runs. Raises BadModel."""
    source_name = resolve(str(source))
    if _is_gguf(source_name):
        from foretell.models.gguf.tokenizer import read_tokenizer

        return read_tokenizer(Path(source_name).expanduser())  # type: ignore[no-any-return]
    from transformers import AutoTokenizer

    location = location_of(source_name, revision)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            location, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # transformers raises nearly anything here
        raise BadModel(
            f"{source_name}: no usable tokenizer ({first_message_line(error)}); "
            "give `demo`, a folder with tokenizer.json or a hub id"
        ) from error
    return tokenizer  # type: ignore[no-any-return]


def _local_folder(name: str) -> Path | None:
    """The local folder a name means, checked; None: it is a hub id."""
    if name in EMBEDDED:
        return fetch_shipped(name)
    folder = Path(name).expanduser()
    if folder.is_file():
        raise BadModel(
            f"{name}: a file; give the folder that holds config.json and the .safetensors files, "
            "or a .gguf file"
        )
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        known = "" if "/" in name else f"; of real models, {suggest_names(name, aliases())}"
        hint = f"give `demo`, a folder with config.json, or a hub id like owner/name{known}"
        raise BadModel(f"{name}: no such folder; {hint}")
    return None


def source_of(source_name: str) -> Path | None:
    """The path that `LM.path` is for a model of this name; None: the hub's. Raises BadModel."""
    source_name = resolve(source_name)
    return Path(source_name).expanduser() if _is_gguf(source_name) else _local_folder(source_name)


def location_of(source_name: str, revision: str | None = None) -> Path | str:
    """The folder or hub id that transformers loads a model by, fetched if known (BadModel)."""
    source_name = resolve(source_name)
    folder = _local_folder(source_name)
    if folder is None:
        ask_hub(source_name, revision)
    return folder or source_name


def _read_model(
    name: str, options: _Options, revision: str | None
) -> tuple[PreTrainedModel, Path | None]:
    """The model on its device, and the folder or file it came from; None: the hub."""
    # Of transformers' models, as that.
    from foretell.loading.classes import check_whole, read_model
    from foretell.models.encoder_decoder.seq2seq import check_plain
    from foretell.models.quantized.quantized import find_settings, read_quantized

    arguments: dict[str, Any] = {
        "dtype": _load_dtype(options) or "auto",
        "use_safetensors": True,
        "trust_remote_code": options.trust_remote_code,
    }
    location: str | Path = name
    folder = _local_folder(name)
    place = packed_models.place_of_folder(folder, options.dtype, options.trust_remote_code)
    if folder is not None:
        check_files(folder)
        location = folder
    else:
        ask_hub(name, revision)
        arguments["revision"] = revision
    if options.device == "cpu":
        quantized_folder = folder or fetch_quantized(name, revision)
        settings = None if quantized_folder is None else find_settings(quantized_folder)
        if quantized_folder is not None and settings is not None:
            hf = read_quantized(quantized_folder, settings, _load_dtype(options))
            return _place_model(hf, name, options), folder
    if folder is not None:
        kept = place.find()
        if kept is not None:
            return kept, folder
    try:
        hf, report = read_model(location, arguments)
    except Exception as error:  # transformers raises nearly anything here
        reason = first_message_line(error)
        raise BadModel(f"{name}: cannot be loaded ({reason}); {cure_of(error, folder)}") from error
    check_whole(name, hf, report)
    if hf.config.is_encoder_decoder:
        check_plain(name, options.exact_bits, options.backend, options.dtype)
    hf = _place_model(hf, name, options)
    kept = place.find() if place.keep(hf) else None  # which takes no memory of its own
    return kept or hf, folder


def _unpack_gguf(source_name: str, options: _Options) -> tuple[PreTrainedModel, Path]:
    """The model in a .gguf file, its matrices unpacked, on its device."""
    from foretell.models.gguf.gguf import read_unpacked

    file_path = Path(source_name).expanduser()
    try:
        hf = read_unpacked(file_path, _load_dtype(options) or torch.bfloat16)
    except LookupError as error:
        cure = "leave backend out, and llama.cpp runs it"
        raise BadModel(f"{source_name}: cannot be unpacked ({error}); {cure}") from error
    return _place_model(hf, source_name, options), file_path


def _load_dtype(options: _Options) -> torch.dtype | None:
    """The number format that a model is loaded in; None: as it is stored."""
    if options.dtype in WHOLE_NUMBERS:  # what is not a linear layer's weights
        return torch.bfloat16
    return DTYPES.get(options.dtype)


def _place_model(hf: PreTrainedModel, name: str, options: _Options) -> PreTrainedModel:
    """The model in its number format, on its device."""
    from foretell.models.decoder.smoothing import round_layers

    if options.dtype in WHOLE_NUMBERS and not round_layers(hf, options.dtype):
        option = f"dtype={options.dtype!r}"
        raise Unsupported.missing_capability(option, name, "torch's linear layers", "use bfloat16")
    return hf.to(options.device).eval()  # type: ignore[arg-type]
