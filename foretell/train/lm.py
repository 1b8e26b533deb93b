"""Trains a small Llama-style language model on text, or distils one from a teacher: `foretell train
lm`.

This file knows optimisers, schedules and checkpoints; `corpus.py` knows the texts. Matrices of the
layers are trained with Muon (Jordan et al. 2024), embeddings and norms with AdamW; the rate is
constant and then falls linearly to zero. A run folder can be interrupted at any time and continued
by the same command: weights and optimiser state are kept as safetensors, and the batch of step i
depends on i and the seed alone.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from foretell.errors import BadConfig, first_line
from foretell.loading.load import place_of
from foretell.ops.files import whole, write_text
from foretell.ops.parsing import json_of
from foretell.progress import Bar
from foretell.train import recipes, saved
from foretell.train.corpus import END, prepare
from foretell.train.processes import Processes, launched


def check_heads(hidden: int, heads: int, kv_heads: int) -> None:
    """Raises BadConfig for heads that do not divide the width."""
    if hidden % heads or heads % kv_heads:
        raise BadConfig(
            f"hidden={hidden} must be a multiple of heads={heads}, and that of kv_heads={kv_heads}"
        )


@dataclass(frozen=True)
class TrainLM:
    """Shape of the model and of the run. Lengths are in tokens."""

    hidden: int = 384  # width of the hidden state
    layers: int = 6  # layers of the model
    heads: int = 6  # attention heads
    kv_heads: int = 2  # heads of keys and values
    intermediate: int = 1024  # width inside a feed-forward block
    vocab_size: int = 8192  # tokens of the tokenizer that is trained
    context: int = 2048  # tokens of the longest sequence, used by the last part of the run
    short_context: int = 512  # sequence length before that
    long_share: float = 0.08  # share of the steps run at `context`
    tokens: int = 11_600_000  # training tokens in all
    batch: int = 16_384  # tokens a step
    micro: int = 4_096  # tokens a forward
    matrix_rate: float = 0.02  # learning rate of matrices (Muon)
    other_rate: float = 0.003  # learning rate of embeddings and norms (AdamW)
    warmup: int = 20  # steps over which the rate rises
    decay: float = 0.6  # share of the run over which the rate falls to 0
    seed: int = 0  # of the weights and of the order of texts

    def __post_init__(self) -> None:
        check_heads(self.hidden, self.heads, self.kv_heads)
        if (
            self.batch % self.micro
            or self.micro % self.context
            or self.context % self.short_context
        ):
            raise BadConfig(
                "batch must be a multiple of micro, micro of context, context of short_context"
            )

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)


def build(config: TrainLM, end: int) -> LlamaForCausalLM:
    """A random Llama with tied embeddings, float32."""
    torch.manual_seed(config.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end + 1,
            attn_implementation="sdpa",
        )
    )


def batch_of(data: np.ndarray, length: int, count: int, seed: int) -> torch.Tensor:
    """`count` random windows of `length` + 1 tokens, int64 (count, length + 1)."""
    starts = np.random.default_rng(seed).integers(0, len(data) - length - 1, count)
    return torch.from_numpy(np.stack([data[s : s + length + 1] for s in starts]).astype(np.int64))


def rate(step: int, config: Any) -> float:
    """The schedule: a short warm-up, constant, then linear to zero."""
    rest = (config.steps - step) / max(1.0, config.decay * config.steps)
    return min(1.0, (step + 1) / config.warmup, rest)


def evaluate(model: torch.nn.Module, corpus: Path, length: int = 1024) -> dict[str, float]:
    """Bits per byte of the held-out documents in windows of `length` tokens, by the first part of
    their names.
    """
    data = np.fromfile(corpus / "heldout.bin", dtype=np.uint16)
    names, sizes = [], []
    for line in (corpus / "heldout.jsonl").read_text("utf-8").splitlines():
        row = json_of(line)
        names.append(row["name"].split("/")[0])
        sizes.append(len(row["text"].encode()))
    starts = [*np.flatnonzero(data == 0).tolist(), len(data)]  # every document begins with token 0
    bits: dict[str, float] = {}
    totals: dict[str, int] = {}
    model.eval()
    for name, size, first, end in zip(names, sizes, starts[:-1], starts[1:], strict=True):
        nats = 0.0
        for low in range(first, end - 1, length):
            ids = torch.from_numpy(data[low : min(low + length + 1, end)].astype(np.int64))[None]
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids[:, :-1]).logits.float()
            nats += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        for key in (name, "all"):
            bits[key] = bits.get(key, 0.0) + nats / math.log(2)
            totals[key] = totals.get(key, 0) + size
    model.train()
    return {key: round(value / totals[key], 4) for key, value in sorted(bits.items())}


def loss_of(
    model: torch.nn.Module, teacher: torch.nn.Module | None, ids: torch.Tensor
) -> torch.Tensor:
    """Cross entropy with the text, or with a teacher half of that and half the KL from its law
    (token mean).
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1]).logits
    text = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    if teacher is None:
        return text
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        goal = teacher(input_ids=ids[:, :-1]).logits
    kl = F.kl_div(
        logits.flatten(0, 1).float().log_softmax(-1),
        goal.flatten(0, 1).float().log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    return 0.1 * text + 0.9 * kl


LossOf = Callable[[torch.nn.Module, torch.nn.Module | None, torch.Tensor], torch.Tensor]


class Run:
    """A run folder: model, optimisers, step; saved and restored as safetensors.

    `layers`: the part of the model whose matrices are trained with Muon. `processes`: those that
    share its steps, of which the first one writes; without them there must be one process.
    """

    longer = "tokens"  # the setting that may be larger when a run is continued
    unit = "tokens"  # of `config.batch`

    def __init__(
        self,
        folder: Path,
        config: Any,
        model: Any,
        layers: torch.nn.Module,
        processes: Processes | None = None,
    ):
        self.folder, self.config, self.step = folder, config, 0
        self.model = model
        if processes is None and launched() > 1:
            raise BadConfig("this is trained by one process: start it without `accelerate launch`")
        self.processes = processes or Processes()
        rated = self.rated(layers)
        self.optimisers = [optimiser for optimiser, _ in rated]
        self.rates = [rate for _, rate in rated]
        settings = folder / "train.json"
        if settings.exists():
            now = asdict(config)
            try:
                before = json_of(settings.read_text("utf-8"))
                same = {**before, self.longer: 0} == {**now, self.longer: 0}
                same = same and before[self.longer] <= now[self.longer]
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise saved.damaged(settings, first_line(error)) from error
            if not same:
                raise BadConfig(
                    f"{folder} holds a run with other settings; "
                    "repeat them, or choose another --out"
                )
        self.processes.wait()  # until all have read what was there
        if self.processes.first:
            write_text(settings, json.dumps(asdict(config), indent=1))
        if (folder / "state.safetensors").exists():
            self.restore()

    def rated(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        """The optimisers, each with its learning rate."""
        c = self.config
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        muon = torch.optim.Muon(matrices, lr=c.matrix_rate, momentum=0.95, weight_decay=0.05)
        adam = torch.optim.AdamW(others, lr=c.other_rate, betas=(0.9, 0.95), weight_decay=0.0)
        return [(muon, c.matrix_rate), (adam, c.other_rate)]

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The model's parameters that change, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def keep(self, recipe: Mapping[str, Any] | None) -> None:
        """Writes all that the run was started with into its folder."""
        if recipe is not None and self.processes.first:
            recipes.write(recipe, self.folder)

    def save(self) -> None:
        if not self.processes.first:
            return
        tensors = {"step": torch.tensor(self.step)}
        tensors |= {f"model.{n}": p.detach() for n, p in self.trained.items()}
        for which, optimiser in enumerate(self.optimisers):
            for index, state in optimiser.state_dict()["state"].items():
                tensors |= {
                    f"optimiser.{which}.{index}.{k}": v
                    for k, v in state.items()
                    if torch.is_tensor(v)
                }
        tensors |= {f"extra.{name}": value for name, value in self.extra().items()}
        with whole(self.folder / "state.safetensors") as part:
            save_file({key: value.contiguous().clone() for key, value in tensors.items()}, part)

    def restore(self) -> None:
        """Goes on from what is saved. Raises BadFile where it is not what this run saved."""
        path = self.folder / "state.safetensors"
        tensors = saved.tensors_of(path)
        model, extra = saved.part(tensors, "model."), saved.part(tensors, "extra.")
        step = tensors.get("step", torch.tensor(-1))
        if step.shape or step.is_floating_point() or not 0 <= int(step) <= self.config.steps:
            raise saved.damaged(path, f"its step is none of {self.config.steps}")
        saved.check(path, model, self.trained)
        saved.check(path, extra, self.extra())
        states = []
        for which, optimiser in enumerate(self.optimisers):
            own = [p for group in optimiser.param_groups for p in group["params"]]
            part = saved.part(tensors, f"optimiser.{which}.")
            states.append(saved.optimiser_state(path, part, own))
        self.step = int(step)
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(model[name])
        for optimiser, state in zip(self.optimisers, states, strict=True):
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
        if extra:
            self.take_extra(extra)

    def extra(self) -> dict[str, torch.Tensor]:
        """What else a run goes on from, by name."""
        return {}

    def take_extra(self, extra: dict[str, torch.Tensor]) -> None:
        """Goes on from what `extra` gave when the run was saved."""

    def through(self, advance: Callable[[], float], save_every: float, quiet: bool) -> None:
        """Calls `advance` for every step that is left, with a bar and a log. The run is saved every
        `save_every` seconds, when it is interrupted and at the end.
        """
        config = self.config
        saved = start = time.monotonic()
        first = self.step
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        first_one = self.processes.first
        bars = Bar(*columns, console=Console(stderr=True), quiet=quiet or not first_one)
        record = self.folder / "log.jsonl" if first_one else Path(os.devnull)
        with bars as progress, record.open("a") as log, interrupts() as stop:
            title = f"{self.size / 1e6:.1f} M parameters"
            bar = progress.add_task(title, total=config.steps, completed=first)
            while self.step < config.steps:
                if self.processes.total(len(stop)):  # all end behind the same step
                    self.save()
                    raise KeyboardInterrupt
                loss = advance()
                speed = (self.step - first) * config.batch / (time.monotonic() - start)
                told = f"loss {loss:.3f}  {speed:,.0f} {self.unit}/s"
                progress.update(bar, completed=self.step, description=told)
                line = {
                    "step": self.step,
                    "loss": round(loss, 4),
                    f"{self.unit}_per_s": round(speed),
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                if time.monotonic() - saved > save_every:
                    self.save()
                    saved = time.monotonic()
        self.save()

    @property
    def size(self) -> int:
        """Parameters that are trained."""
        return sum(p.numel() for p in self.trained.values())

    def advance(
        self, data: np.ndarray, teacher: torch.nn.Module | None, loss_of: LossOf = loss_of
    ) -> float:
        """One optimiser step; returns its mean loss (nats per token)."""
        c = self.config
        length = c.context if self.step >= (1 - c.long_share) * c.steps else c.short_context
        parts = c.batch // c.micro
        total = 0.0
        for part in range(parts):
            ids = batch_of(
                data, length, c.micro // length, seed=(c.seed * 1_000_003 + self.step) * 64 + part
            )
            loss = loss_of(self.model, teacher, ids) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.update()
        return total

    def share(self) -> float:
        """What part of its learning rates the next step has."""
        return rate(self.step, self.config)

    def update(self) -> None:
        """The end of an optimiser step, when the gradients are there."""
        self.processes.add_gradients(self.model.parameters())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser, base in zip(self.optimisers, self.rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = base * self.share()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1


def export(
    model: PreTrainedModel, corpus: Path, folder: Path, stored: torch.dtype = torch.bfloat16
) -> None:
    """Writes a folder that `foretell.load` and transformers open: safetensors, config, tokenizer.

    The weights, of float32, are `stored` in this number format.
    """
    keep = {n: p.detach().clone() for n, p in model.state_dict().items()}
    model.to(stored).save_pretrained(folder, safe_serialization=True)
    model.to(torch.float32).load_state_dict(keep)
    PreTrainedTokenizerFast(
        tokenizer_file=str(corpus / "tokenizer.json"),
        bos_token=END,
        eos_token=END,
        pad_token="<|pad|>",
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Filled by the first Ctrl-C, so that a step is finished and kept; a second one ends the run at
    once.
    """
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def read_model(given: str, what: str) -> Any:
    """The model of a folder or a known name in float32. Raises BadModel, and BadConfig, which
    names `what` it is for.
    """
    place = place_of(given)
    try:
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    except (RuntimeError, OSError, ValueError) as error:
        raise BadConfig(f"{what}={given}: cannot be read ({first_line(error)})") from error


def begin_with(model: LlamaForCausalLM, init: str) -> None:
    """Takes a model's weights. Raises BadModel, and BadConfig for one of another shape."""
    other = read_model(init, "init")
    try:
        model.load_state_dict(other.state_dict())
    except RuntimeError as error:
        raise BadConfig(f"init={init}: cannot begin with it ({first_line(error)})") from error


def train(
    corpus: Path,
    out: Path,
    config: TrainLM,
    sources: list[str],
    teacher: str | None = None,
    save_every: float = 300.0,
    compiled: bool = True,
    quiet: bool = False,
    init: str | None = None,
) -> dict[str, object]:
    """Trains until `config.tokens` are seen, saving every `save_every` seconds; returns and writes
    the report.

    `init`: a model of the same shape to begin with. Its tokenizer, or the teacher's,
    codes the texts.
    """
    init = init and str(place_of(init))
    teacher = teacher and str(place_of(teacher))
    relative = Path(init or teacher or "") / "tokenizer.json"
    info = prepare(
        corpus, sources, config.vocab_size, tokenizer=relative if relative.is_file() else None
    )
    out.mkdir(parents=True, exist_ok=True)
    data = np.memmap(corpus / "train.bin", dtype=np.uint16, mode="r")
    master = (
        AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
        if teacher
        else None
    )
    model = build(config, end=0)
    run = Run(out, config, model, model.model.layers)
    if init and not run.step:
        begin_with(run.model, init)
    objective: LossOf = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    run.through(lambda: run.advance(data, master, objective), save_every, quiet)
    export(run.model, corpus, out / "model")
    report: dict[str, object] = {
        "parameters": run.size,
        "tokens_seen": config.steps * config.batch,
        "heldout_bits_per_byte": evaluate(run.model, corpus),
        "corpus": info,
        "settings": asdict(config),
        "teacher": teacher and Path(teacher).name,
    }
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report
