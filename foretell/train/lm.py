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

from foretell.errors import BadConfig, first_message_line
from foretell.loading.load import location_of
from foretell.ops.files import replace_file, write_text
from foretell.ops.parsing import parse_json
from foretell.progress import Bar
from foretell.train import recipes, saved
from foretell.train.corpus import END, prepare_corpus
from foretell.train.processes import Processes, process_count


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


def build_llama(config: TrainLM, end: int) -> LlamaForCausalLM:
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


def rate_share(step: int, config: Any) -> float:
    """The schedule: a short warm-up, constant, then linear to zero."""
    rest = (config.steps - step) / max(1.0, config.decay * config.steps)
    return min(1.0, (step + 1) / config.warmup, rest)


def bits_per_byte(model: torch.nn.Module, corpus: Path, length: int = 1024) -> dict[str, float]:
    """Bits per byte of the held-out documents in windows of `length` tokens, by the first part of
    their names.
    """
    data = np.fromfile(corpus / "heldout.bin", dtype=np.uint16)
    names, byte_counts = [], []
    for line in (corpus / "heldout.jsonl").read_text("utf-8").splitlines():
        row = parse_json(line)
        names.append(row["name"].split("/")[0])
        byte_counts.append(len(row["text"].encode()))
    starts = [*np.flatnonzero(data == 0).tolist(), len(data)]  # every document begins with token 0
    bits: dict[str, float] = {}
    byte_totals: dict[str, int] = {}
    model.eval()
    for name, byte_count, first_token, end in zip(
        names, byte_counts, starts[:-1], starts[1:], strict=True
    ):
        nats = 0.0
        for window_start in range(first_token, end - 1, length):
            ids = torch.from_numpy(
                data[window_start : min(window_start + length + 1, end)].astype(np.int64)
            )[None]
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids[:, :-1]).logits.float()
            nats += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        for key in (name, "all"):
            bits[key] = bits.get(key, 0.0) + nats / math.log(2)
            byte_totals[key] = byte_totals.get(key, 0) + byte_count
    model.train()
    return {key: round(value / byte_totals[key], 4) for key, value in sorted(bits.items())}


def text_loss(
    model: torch.nn.Module, teacher: torch.nn.Module | None, ids: torch.Tensor
) -> torch.Tensor:
    """Cross entropy with the text, or with a teacher half of that and half the KL from its
    distribution (token mean).
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
        if processes is None and process_count() > 1:
            raise BadConfig("this is trained by one process: start it without `accelerate launch`")
        self.processes = processes or Processes()
        optimiser_rates = self.make_optimisers(layers)
        self.optimisers = [optimiser for optimiser, _ in optimiser_rates]
        self.rates = [rate for _, rate in optimiser_rates]
        settings_path = folder / "train.json"
        if settings_path.exists():
            settings_now = asdict(config)
            try:
                earlier_settings = parse_json(settings_path.read_text("utf-8"))
                is_same = {**earlier_settings, self.longer: 0} == {**settings_now, self.longer: 0}
                is_same = is_same and earlier_settings[self.longer] <= settings_now[self.longer]
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise saved.damaged_file(settings_path, first_message_line(error)) from error
            if not is_same:
                raise BadConfig(
                    f"{folder} holds a run with other settings; "
                    "repeat them, or choose another --out"
                )
        self.processes.wait()  # until all have read what was there
        if self.processes.is_first:
            write_text(settings_path, json.dumps(asdict(config), indent=1))
        if (folder / "state.safetensors").exists():
            self.restore()

    def make_optimisers(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        """The optimisers, each with its learning rate."""
        c = self.config
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        matrix_ids = {id(p) for p in matrices}
        other_weights = [p for p in self.model.parameters() if id(p) not in matrix_ids]
        muon = torch.optim.Muon(matrices, lr=c.matrix_rate, momentum=0.95, weight_decay=0.05)
        adam = torch.optim.AdamW(
            other_weights, lr=c.other_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        return [(muon, c.matrix_rate), (adam, c.other_rate)]

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The model's parameters that change, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def keep_recipe(self, recipe: Mapping[str, Any] | None) -> None:
        """Writes all that the run was started with into its folder."""
        if recipe is not None and self.processes.is_first:
            recipes.write_recipe(recipe, self.folder)

    def save(self) -> None:
        if not self.processes.is_first:
            return
        tensors = {"step": torch.tensor(self.step)}
        tensors |= {f"model.{n}": p.detach() for n, p in self.trained.items()}
        for optimiser_number, optimiser in enumerate(self.optimisers):
            for index, state in optimiser.state_dict()["state"].items():
                tensors |= {
                    f"optimiser.{optimiser_number}.{index}.{k}": v
                    for k, v in state.items()
                    if torch.is_tensor(v)
                }
        tensors |= {f"extra.{name}": value for name, value in self.extra_state().items()}
        with replace_file(self.folder / "state.safetensors") as part:
            save_file({key: value.contiguous().clone() for key, value in tensors.items()}, part)

    def restore(self) -> None:
        """Goes on from what is saved. Raises BadFile where it is not what this run saved."""
        path = self.folder / "state.safetensors"
        tensors = saved.tensors_of(path)
        model = saved.tensors_below(tensors, "model.")
        extra = saved.tensors_below(tensors, "extra.")
        step = tensors.get("step", torch.tensor(-1))
        if step.shape or step.is_floating_point() or not 0 <= int(step) <= self.config.steps:
            raise saved.damaged_file(path, f"its step is none of {self.config.steps}")
        saved.check_tensors(path, model, self.trained)
        saved.check_tensors(path, extra, self.extra_state())
        states = []
        for optimiser_number, optimiser in enumerate(self.optimisers):
            optimised = [p for group in optimiser.param_groups for p in group["params"]]
            optimiser_part = saved.tensors_below(tensors, f"optimiser.{optimiser_number}.")
            states.append(saved.optimiser_state(path, optimiser_part, optimised))
        self.step = int(step)
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(model[name])
        for optimiser, state in zip(self.optimisers, states, strict=True):
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
        if extra:
            self.take_extra(extra)

    def extra_state(self) -> dict[str, torch.Tensor]:
        """Tensors that a run goes on from besides weights and optimisers, by name."""
        return {}

    def take_extra(self, extra: dict[str, torch.Tensor]) -> None:
        """Goes on from what `extra` gave when the run was saved."""

    def run_steps(self, advance: Callable[[], float], save_every: float, quiet: bool) -> None:
        """Calls `advance` for every step that is left, with a bar and a log. The run is saved every
        `save_every` seconds, when it is interrupted and at the end.
        """
        config = self.config
        last_save = start = time.monotonic()
        first_step = self.step
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        writes = self.processes.is_first
        progress_bar = Bar(*columns, console=Console(stderr=True), quiet=quiet or not writes)
        log_path = self.folder / "log.jsonl" if writes else Path(os.devnull)
        with progress_bar as progress, log_path.open("a") as log, catch_interrupts() as stop:
            bar_title = f"{self.parameter_count / 1e6:.1f} M parameters"
            bar_task = progress.add_task(bar_title, total=config.steps, completed=first_step)
            while self.step < config.steps:
                if self.processes.total(len(stop)):  # all end after the same step
                    self.save()
                    raise KeyboardInterrupt
                loss = advance()
                speed = (self.step - first_step) * config.batch / (time.monotonic() - start)
                progress_text = f"loss {loss:.3f}  {speed:,.0f} {self.unit}/s"
                progress.update(bar_task, completed=self.step, description=progress_text)
                line = {
                    "step": self.step,
                    "loss": round(loss, 4),
                    f"{self.unit}_per_s": round(speed),
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                if time.monotonic() - last_save > save_every:
                    self.save()
                    last_save = time.monotonic()
        self.save()

    @property
    def parameter_count(self) -> int:
        """Parameters that are trained."""
        return sum(p.numel() for p in self.trained.values())

    def advance(
        self, data: np.ndarray, teacher: torch.nn.Module | None, loss_of: LossOf = text_loss
    ) -> float:
        """Takes an optimiser step; returns its mean loss (nats per token)."""
        c = self.config
        length = c.context if self.step >= (1 - c.long_share) * c.steps else c.short_context
        micro_count = c.batch // c.micro
        loss_sum = 0.0
        for micro_number in range(micro_count):
            ids = batch_of(
                data,
                length,
                c.micro // length,
                seed=(c.seed * 1_000_003 + self.step) * 64 + micro_number,
            )
            loss = loss_of(self.model, teacher, ids) / micro_count
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
        self.update()
        return loss_sum

    def share(self) -> float:
        """Share of the learning rates that the next step has."""
        return rate_share(self.step, self.config)

    def update(self) -> None:
        """Ends an optimiser step, when the gradients are there."""
        self.processes.add_gradients(self.model.parameters())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser, base in zip(self.optimisers, self.rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = base * self.share()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1


def export_model(
    model: PreTrainedModel, corpus: Path, folder: Path, weight_format: torch.dtype = torch.bfloat16
) -> None:
    """Writes a folder that `foretell.load` and transformers open: safetensors, config, tokenizer.

    The weights, of float32, are `weight_format` in this number format.
    """
    float_weights = {n: p.detach().clone() for n, p in model.state_dict().items()}
    model.to(weight_format).save_pretrained(folder, safe_serialization=True)
    model.to(torch.float32).load_state_dict(float_weights)
    PreTrainedTokenizerFast(
        tokenizer_file=str(corpus / "tokenizer.json"),
        bos_token=END,
        eos_token=END,
        pad_token="<|pad|>",
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


@contextmanager
def catch_interrupts() -> Iterator[list[int]]:
    """Yields a list that the first Ctrl-C fills, so that a step is finished and kept; a second one
    ends the run at once.
    """
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    earlier_handler = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, earlier_handler)


def read_model(name: str, option: str) -> Any:
    """The model of a folder or a known name in float32. Raises BadModel, and BadConfig, which
    names `option` it is for.
    """
    model_folder = location_of(name)
    try:
        return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    except (RuntimeError, OSError, ValueError) as error:
        raise BadConfig(f"{option}={name}: cannot be read ({first_message_line(error)})") from error


def begin_with(model: LlamaForCausalLM, init: str) -> None:
    """Takes a model's weights. Raises BadModel, and BadConfig for one of another shape."""
    initial_model = read_model(init, "init")
    try:
        model.load_state_dict(initial_model.state_dict())
    except RuntimeError as error:
        raise BadConfig(
            f"init={init}: cannot begin with it ({first_message_line(error)})"
        ) from error


def train_lm(
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
    init = init and str(location_of(init))
    teacher = teacher and str(location_of(teacher))
    tokenizer_file = Path(init or teacher or "") / "tokenizer.json"
    corpus_record = prepare_corpus(
        corpus,
        sources,
        config.vocab_size,
        tokenizer=tokenizer_file if tokenizer_file.is_file() else None,
    )
    out.mkdir(parents=True, exist_ok=True)
    train_tokens = np.memmap(corpus / "train.bin", dtype=np.uint16, mode="r")
    teacher_model = (
        AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
        if teacher
        else None
    )
    model = build_llama(config, end=0)
    run = Run(out, config, model, model.model.layers)
    if init and not run.step:
        begin_with(run.model, init)
    objective: LossOf = torch.compile(text_loss, dynamic=False) if compiled else text_loss
    run.run_steps(lambda: run.advance(train_tokens, teacher_model, objective), save_every, quiet)
    export_model(run.model, corpus, out / "model")
    report: dict[str, object] = {
        "parameters": run.parameter_count,
        "tokens_seen": config.steps * config.batch,
        "heldout_bits_per_byte": bits_per_byte(run.model, corpus),
        "corpus": corpus_record,
        "settings": asdict(config),
        "teacher": teacher and Path(teacher).name,
    }
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report
