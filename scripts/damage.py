"""Damages files at random and reads them: heads, stores, .gguf files, training states and gates.

    python scripts/damage.py
    python scripts/damage.py heads gguf --mutations 5000 --seed 1

Every file is small and was right before. A mutation changes bytes anywhere, or, after a header
that stays right, numbers of tensors and fields of configurations. Whatever is read in spite of it
drafts or computes, with the C library where it is built. Each reading must end in seconds with a
model, or in one line of `foretell.errors`. `make sanitize` runs it with a C library that watches
its memory (`--library`), so that nothing is read or written outside of it unseen.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import struct
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SECONDS = 20  # that one reading may take
EXTREMES = (0, 1, -1, 2, 127, 255, 65_535, 2**31 - 1, -(2**31), 2**31, 2**40, 2**63 - 1)
WORDS: tuple[Any, ...] = (*EXTREMES, 0.5, -0.0, 1e300, True, None, "", "x", [], [0], {}, [[]])
Use = Callable[[], object]


class TooSlow(Exception):
    """A reading that does not end."""


def bytes_changed(data: bytes, draw: random.Random) -> bytes:
    """Some bytes of a file are others, or missing, or there twice."""
    made = bytearray(data)
    # Most of what is read with care stands at the beginning.
    reach = len(made) if draw.random() < 0.3 else min(len(made), 4096)
    for _ in range(draw.choice((1, 1, 1, 2, 5, 20))):
        at, kind = draw.randrange(max(1, reach)), draw.randrange(6)
        if kind == 0:
            made[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            made[at : at + 1] = (
                bytes([made[at] ^ 1 << draw.randrange(8)]) if at < len(made) else b""
            )
        elif kind == 2:
            word = struct.pack("<q", max(-(2**63), min(2**63 - 1, draw.choice(EXTREMES))))
            size = draw.choice((1, 2, 4, 8))
            made[at : at + size] = word[:size]
        elif kind == 3:
            del made[at : at + draw.choice((1, 8, 100, len(made)))]
        elif kind == 4:
            made[at:at] = made[at : at + draw.choice((1, 8, 100))]
        else:
            made[at:at] = draw.randbytes(draw.choice((1, 8, 100)))
    return bytes(made)


def tensor_changed(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Another number somewhere, another shape, or another format."""
    kind = draw.randrange(6)
    if kind == 0 or not tensor.numel():
        return tensor[:1].clone() if tensor.dim() else tensor[None].clone()
    if kind == 1:
        return tensor.flatten()[: draw.randrange(tensor.numel() + 1)].clone()
    if kind == 2:
        return torch.cat([tensor.reshape(-1), tensor.reshape(-1)])
    if kind == 3:
        return tensor.to(draw.choice((torch.int32, torch.int64, torch.float32, torch.bool)))
    made = tensor.clone()
    flat = made.view(-1)
    value = draw.choice((*EXTREMES, float("nan"), float("inf"), 96, 97, 98, 400))
    if not tensor.is_floating_point():
        value = 0 if value != value or abs(value) == float("inf") else int(value)
        value = max(-(2**31), min(2**31 - 1, value))
    for _ in range(draw.choice((1, 1, 4))):
        flat[draw.randrange(len(flat))] = value
    return made


def value_changed(value: Any, draw: random.Random) -> Any:
    """A configuration with another value somewhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        if draw.random() < 0.15:
            return {key: part for key, part in value.items() if key != name}
        return {**value, name: value_changed(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], value_changed(value[at], draw), *value[at + 1 :]]
    if isinstance(value, int) and draw.random() < 0.4:
        return value + draw.choice((-1, 1, 2, -value, value))
    return draw.choice(WORDS)


def damage(path: Path, draw: random.Random, sign: Callable[..., dict[str, str]] | None) -> None:
    """Damages a file of any of these formats; `sign` makes the header right again."""
    if path.suffix == ".json" and draw.random() < 0.7:
        path.write_text(json.dumps(value_changed(json.loads(path.read_text("utf-8")), draw)))
        return
    if path.suffix == ".safetensors" and draw.random() < 0.6:
        with safe_open(path, "pt") as opened:
            about = dict(opened.metadata() or {})
        tensors = load_file(path)
        name = draw.choice(sorted(tensors))
        what = draw.random()
        if what < 0.1:
            del tensors[name]
        elif what < 0.2:
            tensors[f"{name}.more"] = tensors.pop(name)
        else:
            tensors[name] = tensor_changed(tensors[name], draw)
        if about and draw.random() < 0.2:
            key = draw.choice(sorted(about))
            about[key] = str(draw.choice(WORDS))
        save_file(tensors, path, about if sign is None else sign(about, tensors))
        return
    path.write_bytes(bytes_changed(path.read_bytes(), draw))


# --- what is damaged, and how it is used if it can still be read


class Kind:
    """Files of one kind in a folder, and how they are read and used."""

    def __init__(self, folder: Path):
        self.folder = folder

    def sign(self, about: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        return about

    def use(self, folder: Path) -> None:
        raise NotImplementedError


def target() -> Any:
    """A small llama whose weights are packed, computed by the C library where it is there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from foretell.backends.native import NativeBackend
    from foretell.models.decoder.decoder import Decoder
    from foretell.models.decoder.fused import fused_blocks
    from foretell.models.decoder.packed import pack_layers
    from foretell.native import library

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=256)
    hf = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    pack_layers(hf, "int8")
    decoder = Decoder(hf, "small", fused_blocks)
    if library.is_available():
        decoder.use(NativeBackend)
    return decoder


def drafted(engine: Any, drafter: Any, tokens: int = 6) -> None:
    """A few tokens after a text. Raises what ended them."""
    from foretell.core.request import Request
    from foretell.core.types import Sampling
    from foretell.speculation.strategy import Speculative

    sampling = Sampling(max_new_tokens=tokens)
    live = engine.add(Request([5, 3, 5, 3, 9], Speculative(drafter), sampling))
    for _ in engine.run():
        pass
    if live.error is not None:
        raise live.error.__cause__ or live.error


class Heads(Kind):
    """Heads of every kind that has an output matrix or tokens of its own."""

    KINDS = ("eagle3", "eagle", "mtp", "medusa", "hydra", "mlp-speculator", "clover")
    OWN = ("eagle3", "mtp", "medusa", "hydra", "mlp-speculator")

    def __init__(self, folder: Path):
        from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape

        super().__init__(folder)
        self.target = target()
        shape = target_shape(self.target)
        for kind in self.KINDS:
            kept = torch.arange(0, shape.vocab, 2) if kind in ("eagle3", "clover") else None
            options = {}
            if kind in self.OWN:
                options["own_matrix"] = shape.vocab if kept is None else len(kept)
            save_head(build_head(kind, shape, options), kept, folder / kind, self.target, {})

    def use(self, folder: Path) -> None:
        from foretell.engine.engine import Engine
        from foretell.registry import load_method

        for path in sorted(folder.iterdir()):
            engine = Engine({"target": self.target})
            drafted(engine, load_method(path.name, "drafter")(head=str(path)))


class Stores(Kind):
    """What drafters learnt of a text, under a right checksum."""

    DRAFTERS = ("token-recycling", "suffix", "goose", "ngram")

    def __init__(self, folder: Path):
        from foretell.engine import saved_stores as stores
        from foretell.engine.engine import Engine
        from foretell.registry import load_method

        super().__init__(folder)
        self.target = target()
        engine = Engine({"target": self.target})
        for name in self.DRAFTERS:
            drafted(engine, load_method(name, "drafter")(), 12)
        stores.save_stores(engine, folder)

    def sign(self, about: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        from foretell.engine import saved_stores as stores

        return about | {"sha256": stores._digest_tensors(tensors)}

    def use(self, folder: Path) -> None:
        from foretell.engine import saved_stores as stores
        from foretell.engine.engine import Engine

        engine = Engine({"target": self.target})
        stores.load_stores(engine, folder)
        for _, drafter, _, _ in [*stores.iterate_stores(engine)]:
            drafted(engine, drafter)


class Gguf(Kind):
    """A file of 8 bits, with its words."""

    def __init__(self, folder: Path):
        from tests import tiny

        super().__init__(folder)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        tiny.gguf(tiny.llama(**sizes, **heads), folder / "model.gguf", kind="Q8_0")

    def use(self, folder: Path) -> None:
        from foretell.backends.native import NativeBackend
        from foretell.errors import BadModel
        from foretell.models.decoder.decoder import Decoder
        from foretell.models.decoder.fused import fused_blocks
        from foretell.models.gguf import gguf

        try:
            decoder = Decoder(gguf.read_packed(folder / "model.gguf"), "damaged", fused_blocks)
            decoder.use(NativeBackend)
        except LookupError as error:  # why another runtime reads it
            raise BadModel(str(error)) from error
        decoder.score([1, 2, 3])


class States(Kind):
    """A training run behind two steps."""

    def __init__(self, folder: Path):
        import numpy as np

        super().__init__(folder)
        run = self.run(folder)
        for _ in range(2):
            run.advance(np.arange(1000, dtype=np.uint16) % 300, None)
        run.save()

    @staticmethod
    def run(folder: Path) -> Any:
        from foretell.train.lm import Run, TrainLM, build_llama

        sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 16}
        lengths = {"context": 16, "short_context": 16, "batch": 64, "micro": 64}
        config = TrainLM(**sizes, **lengths, vocab_size=300, tokens=256, warmup=1)
        model = build_llama(config, end=0)
        return Run(folder, config, model, model.model.layers)

    def use(self, folder: Path) -> None:
        self.run(folder)


class Gates(Kind):
    """Gates of key heads."""

    def __init__(self, folder: Path):
        from foretell.kv.select import gates

        super().__init__(folder)
        self.target = target()
        gates.save_gates(torch.rand(3, 2), folder / "gates.safetensors", self.target, 1)

    def use(self, folder: Path) -> None:
        from foretell.kv.select import gates

        found = gates.streaming_of(self.target, 0.5, str(folder), "duo-attention")
        assert found.shape == (3, 2)


KINDS: dict[str, type[Kind]] = {
    "heads": Heads, "stores": Stores, "gguf": Gguf, "states": States, "gates": Gates
}  # fmt: skip


@contextmanager
def in_time() -> Iterator[None]:
    """Raises TooSlow in what takes too long."""

    def end(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(kind: Kind, folder: Path) -> str:
    """How the reading of a folder ended; a fault begins with `fault`."""
    from foretell.errors import ForetellError

    try:
        with in_time(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.use(folder)
    except ForetellError as error:
        return "refused" if "\n" not in str(error) else f"fault: several lines: {error}"
    except TooSlow:
        return f"fault: longer than {SECONDS} s"
    except Exception as error:
        return f"fault: {type(error).__name__}: {error}"
    return "read"


def check(name: str, mutations: int, seed: int) -> int:
    """Damages files of a kind so often; returns how many faults there were."""
    ended: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="foretell-") as place:
        good, bad = Path(place) / "good", Path(place) / "bad"
        good.mkdir()
        kind = KINDS[name](good)
        found = tried(kind, good)
        if found != "read":
            print(f"{name}: what is right is not read ({found})")
            return 1
        parts = sorted(path for path in good.iterdir() if path.is_dir()) or [good]
        for number in range(mutations):
            draw = random.Random(f"{name} {seed} {number}")
            part = draw.choice(parts)
            shutil.rmtree(bad, ignore_errors=True)
            to = bad if part is good else bad / part.name
            shutil.copytree(part, to)
            file = draw.choice(sorted(path for path in to.iterdir() if path.is_file()))
            damage(file, draw, kind.sign if name == "stores" else None)
            found = tried(kind, bad)
            ended[found.partition(":")[0]] += 1
            if found.startswith("fault"):
                print(f"{name}, mutation {number} of seed {seed}, {file.name}: {found}")
    print(f"{name}: {mutations} mutations, {ended['refused']} refused, {ended['read']} read, "
          f"{ended['fault']} faults")  # fmt: skip
    return ended["fault"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="all, if none is named")
    parser.add_argument("--mutations", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", help="another build of the C library")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the tests' tiny models
    if options.library:
        built = types.ModuleType("foretell.native._library")
        built.__file__ = str(Path(options.library).resolve())
        sys.modules[built.__name__] = built
    torch.set_num_threads(1)
    faults = [check(name, options.mutations, options.seed) for name in options.kinds or KINDS]
    return 1 if any(faults) else 0


if __name__ == "__main__":
    sys.exit(main())
