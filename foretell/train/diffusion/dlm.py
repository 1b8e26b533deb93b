"""Trains models that fill canvases: `foretell train dlm`.

A new small model for lists and puzzles, or a model that wrote from left to right and is made to see
both sides (`init`): its mask gets a row of its own in the embeddings, and its rows go on speaking
of the next position (shift 1), as Dream and DiffuLLaMA do it. Or, with `objective=certainty`, a
model that fills canvases learns to be sure of many tokens at once, on its own answers.

Sources: Nie et al., Large Language Diffusion Models (arXiv 2502.09992); Ye et al., Dream 7B (arXiv
2508.15487), section 3; Gong et al., Scaling Diffusion Language Models via Adaptation from
Autoregressive Models (arXiv 2410.17891), section 3; Chen et al., dParallel (arXiv 2509.26488).
Differs: attention is bidirectional from the first step, without annealing; of new models matrices
are trained with Muon; one end follows an answer, and after some more, as many as are drawn,
where LLaDA fills all texts of a batch up with ends. These would be most of what is masked of short
answers, and the rest would be learnt far later. Answers that teach certainty fill their last block
with ends, as canvases do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from foretell.errors import BadConfig, BadFile, first_message_line
from foretell.models.decoder.adapted import LoraLinear
from foretell.models.diffusion.masked import OURS
from foretell.ops.devices import check_device
from foretell.ops.files import replace_file, write_text
from foretell.train import recipes
from foretell.train.amateur import TrainAmateur, merge_lora, save_lora, with_lora
from foretell.train.answers import PIECE, read_texts
from foretell.train.diffusion.canvases import Batches, Canvases, Examples, pad_texts
from foretell.train.diffusion.converting import convert_model, shorten_model
from foretell.train.diffusion.lists import LONGEST, ROOM, Example, Lists, model_questions
from foretell.train.diffusion.masking import (
    MASKS,
    Masked,
    Reader,
    certainty_loss,
    count_right,
    draw_masks,
    masked_loss,
    split_blocks,
)
from foretell.train.draft import group_lengths
from foretell.train.lm import Run, check_heads

if TYPE_CHECKING:
    from foretell.api.lm import LM

OBJECTIVES = ("masked", "certainty")
PRECISIONS = ("float32", "bfloat16")
AT_ONCE = 32  # prompts that are answered beside each other
HELD_BACK = 32  # one of so many answers is for measuring
RATES = (0.15, 0.5, 0.9)  # at which a finished model is asked
PROJECTIONS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
Tell = Callable[[str, int, int | None], None]
Telling = Callable[[], AbstractContextManager[Tell | None]]


@dataclass(frozen=True)
class TrainDLM:
    """Shape of a new model and of the run. Lengths are in tokens."""

    objective: str = "masked"  # or certainty
    masks: str = "rate"  # each token with a drawn probability, or a drawn `count` of them
    hidden: int = 128  # width of the hidden state of a new model
    layers: int = 6  # its layers
    cut: int = 0  # layers that are kept of the model to begin with; 0: all
    heads: int = 4  # its attention heads
    intermediate: int = 384  # width inside its feed-forward blocks
    block: int = 0  # positions of a block, which sees itself and those before; 0: all see all
    certain: int = 32  # positions of a block that learns certainty
    beta: float = 2.0  # weight of the entropy in the objective certainty
    examples: int = 200_000  # texts in all
    batch: int = 64  # texts a step
    micro: int = 4_096  # tokens a forward
    window: int = 640  # tokens of the longest text
    longest: int = 64  # of its own answers
    rank: int = 0  # of adapters, which alone are trained; 0: the whole model is
    rate: float = 0.003  # learning rate (AdamW)
    matrix_rate: float = 0.02  # learning rate of matrices of layers (Muon); 0: AdamW for all
    precision: str = "float32"  # of forwards, or bfloat16; weights are float32
    warmup: int = 20  # steps over which the rates rise
    decay: float = 0.6  # share of the run over which the rates fall to 0
    seed: int = 0  # of the weights, the texts and the masks

    def __post_init__(self) -> None:
        check_heads(self.hidden, self.heads, self.heads)
        ranges = {
            "cut": (0, 1 << 10),
            "block": (0, 1 << 16),
            "certain": (1, 1 << 16),
            "beta": (0, 100),
            "examples": recipes.SIZE,
            "batch": recipes.SIZE,
            "micro": recipes.SIZE,
            "window": (2, 1 << 20),
            "longest": (1, 1 << 16),
            "rank": (0, 1024),
            "rate": recipes.RATE,
            "matrix_rate": recipes.RATE,
            "warmup": recipes.SIZE,
            "decay": (0, 1),
            "seed": (0, 1 << 31),
        }
        recipes.check_ranges(self, ranges)
        choices = {"objective": OBJECTIVES, "masks": tuple(MASKS), "precision": PRECISIONS}
        for name, allowed_values in choices.items():
            if getattr(self, name) not in allowed_values:
                raise BadConfig.field(
                    name, getattr(self, name), f"one of {', '.join(allowed_values)}"
                )
        if self.rank and self.matrix_rate:
            raise BadConfig.field("matrix_rate", self.matrix_rate, "0 where rank trains adapters")

    @property
    def steps(self) -> int:
        return max(1, self.examples // self.batch)


class Answers:
    """Answers with their prompts, of which one in HELD_BACK is left out; each round over the
    others is in another order. An end follows each that is not cut, and after some more; or
    with `block` so many that they end with a block of that many positions, as canvases do.
    """

    def __init__(self, texts: Sequence[Example], end: int, window: int, seed: int, block: int = 0):
        ended_texts = []
        for text in texts:
            answer = len(text.ids) - text.given_count
            count = block - answer % block if block else 1
            ended_texts.append(text if text.is_cut else with_end(text, end, count))
        fitting_texts = [text for text in ended_texts if len(text.ids) <= window]
        self.held_back = fitting_texts[::HELD_BACK]
        self.train = [text for i, text in enumerate(fitting_texts) if i % HELD_BACK]
        self.end, self.window, self.seed, self.block = end, window, seed, block
        self.longest = max((len(text.ids) - text.given_count for text in self.train), default=0)
        if not self.train:
            raise BadConfig(
                f"{len(fitting_texts)} answers of at most {window} tokens with their prompts are "
                "too few to learn from; give more, or raise window"
            )

    def __getitem__(self, number: int) -> Example:
        round_number, text_place = divmod(number, len(self.train))
        order = np.random.default_rng((self.seed, round_number)).permutation(len(self.train))
        text = self.train[order[text_place]]
        generator = np.random.default_rng((self.seed, round_number, text_place))
        if text.is_cut or self.block or generator.random() >= ROOM:
            return text
        return with_end(text, self.end, int(generator.integers(0, self.window - len(text.ids) + 1)))


def with_end(text: Example, end: int, count: int = 1) -> Example:
    return Example(np.append(text.ids, [end] * count).astype(np.int64), text.given_count)


def answers_in(files: Sequence[Path], ends: Collection[int]) -> list[Example]:
    """The answers in files that `foretell train draft` and `foretell train head` write, without
    their end (one of `ends`), or cut where they have none; or the pieces of plain texts, whose
    first token alone is given.
    """
    answer_examples = []
    for text in (text for file in files for text in read_texts(file)):
        tokens = text.tokens
        has_end = bool(tokens[-1] in ends)
        is_cut = len(tokens) == PIECE if text.prompt == 1 else not has_end
        answer_examples.append(Example(tokens[:-1] if has_end else tokens, text.prompt, is_cut))
    return [text for text in answer_examples if len(text.ids) > text.given_count]


def new_model(config: TrainDLM, vocab: int, mask_id: int, end: int, context: int) -> Reader:
    """A random Llama that fills canvases, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(config.seed)
    shape = LlamaConfig(
        vocab_size=vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=None,  # whose row would learn nothing where it is read
        attn_implementation="sdpa",
    )
    return Reader(LlamaForCausalLM(shape), mask_id, 0, config.block, LONGEST)


class DLMRun(Run):
    """A run folder whose batches are examples. `workers`: processes that make them; 0: this one."""

    longer = "examples"
    unit = "examples"

    def __init__(
        self, folder: Path, config: TrainDLM, reader: Reader, data: Examples, workers: int = 0
    ):
        self.reader, self.workers = reader, workers
        mask: Any = partial(draw_masks, masks=config.masks, block=reader.block)
        if config.objective == "certainty":
            mask = partial(split_blocks, block=config.certain)
        self.batches = Batches(data, mask, config.batch, config.micro, config.seed)
        super().__init__(folder, config, reader.hf, reader.hf.get_decoder().layers)

    def make_optimisers(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        c = self.config
        if not c.matrix_rate:
            trained_weights = [p for p in self.model.parameters() if p.requires_grad]
            adam = torch.optim.AdamW(
                trained_weights, lr=c.rate, betas=(0.9, 0.95), weight_decay=0.01
            )
            return [(adam, c.rate)]
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        matrix_ids = {id(p) for p in matrices}
        other_weights = [p for p in self.model.parameters() if id(p) not in matrix_ids]
        muon = torch.optim.Muon(matrices, lr=c.matrix_rate, momentum=0.95, weight_decay=0.05)
        adam = torch.optim.AdamW(other_weights, lr=c.rate, betas=(0.9, 0.95), weight_decay=0.0)
        return [(muon, c.matrix_rate), (adam, c.rate)]

    @cached_property
    def coming_batches(self) -> Iterator[list[Canvases]]:
        """The batches of this step and the next ones."""
        return self.batches.of(range(self.step, self.config.steps), self.workers)

    def loss(self, canvases: Canvases) -> torch.Tensor:
        """Losses (B,) of the texts of one forward."""
        c, device = self.config, self.reader.hf.device
        ids, masks = canvases.ids.to(device), canvases.masks
        with torch.autocast(device.type, torch.bfloat16, enabled=c.precision == "bfloat16"):
            if isinstance(masks, Masked):
                return masked_loss(self.reader, ids, masks.to(device))
            first_half, second_half, later_blocks = (part.to(device) for part in masks)
            return certainty_loss(self.reader, ids, (first_half, second_half, later_blocks), c.beta)

    def advance_on(self) -> float:
        """Takes an optimiser step; returns the mean loss of its texts."""
        loss_sum = 0.0
        for canvases in next(self.coming_batches):
            loss = self.loss(canvases).sum() / self.config.batch
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
        self.update()
        return loss_sum


def own_answers(
    lm: Any, data: Examples, count: int, config: TrainDLM, telling: Telling = nullcontext
) -> list[Example]:
    """Answers of a model that fills canvases to the prompts of these examples, one token a step and
    the surest first; without its end, which whoever learns from it adds, or cut.
    """
    answer_examples: list[Example] = []
    method = f"confidence:block={config.certain}"
    with telling() as tell:
        while len(answer_examples) < count:
            asked_examples = [
                data[number]
                for number in range(
                    len(answer_examples), min(count, len(answer_examples) + AT_ONCE)
                )
            ]
            prompts = [example.ids[: example.given_count].tolist() for example in asked_examples]
            answer_lengths = [
                min(config.longest, config.window - 1 - len(prompt)) for prompt in prompts
            ]
            answers = lm.generate(prompts, method, max_new_tokens=answer_lengths, temperature=0.0)
            for prompt, answer in zip(prompts, answers, strict=True):
                if answer.error:
                    raise answer.error
                has_end = answer.finish_reason == "stop"
                tokens = answer.tokens[:-1] if has_end else answer.tokens
                answer_examples.append(
                    Example(np.array([*prompt, *tokens]), len(prompt), is_cut=not has_end)
                )
            if tell is not None:
                tell("answering", len(answer_examples), count)
    return answer_examples


def share_right(reader: Reader, texts: Sequence[Example], micro: int) -> dict[str, float]:
    """The share of masked tokens that the model has right, by the share that is masked."""
    shares = {}
    for rate in RATES:
        right_count = count = 0
        for group in group_lengths([len(text.ids) for text in texts], micro, 0):
            ids, answers = pad_texts([texts[i] for i in group])
            group_counts = count_right(reader, ids, answers, rate, [(0, i) for i in group])
            right_count, count = right_count + group_counts[0], count + group_counts[1]
        shares[f"{rate:g}"] = round(right_count / max(1, count), 4)
    return shares


def canvas_config(reader: Reader) -> dict[str, int]:
    """Settings of canvases in a folder's configuration."""
    canvas_settings = {"mask_id": reader.mask_id, "shift": reader.shift, "block": reader.block}
    return canvas_settings | ({"longest": reader.longest} if reader.longest else {})


def export_canvases(reader: Reader, tokenizer: Any, folder: Path) -> None:
    """Writes a folder that `foretell.load` opens as a model that fills canvases, in bfloat16."""
    hf = reader.hf
    setattr(hf.config, OURS, canvas_config(reader))
    float_weights = {name: p.detach().clone() for name, p in hf.state_dict().items()}
    hf.to(torch.bfloat16).save_pretrained(folder)
    hf.to(torch.float32).load_state_dict(float_weights)
    tokenizer.save_pretrained(folder)


def keep_texts(path: Path, make_texts: Callable[[], list[Example]]) -> list[Example]:
    """The texts in a file, which are made and written first where it is not there.

    Raises BadFile for one of an earlier version, which does not say where answers were cut.
    """
    if not path.exists():
        texts = make_texts()
        lengths = [len(text.ids) for text in texts]
        arrays = {
            "ids": np.concatenate([text.ids for text in texts]).astype(np.int64),
            "starts": np.array([0, *lengths]).cumsum(),
            "given": np.array([text.given_count for text in texts]),
            "cut": np.array([text.is_cut for text in texts]),
        }
        with replace_file(path) as part:
            save_file(arrays, part)
    try:
        stored = load_file(path)
        if "cut" not in stored:
            raise BadFile(f"{path}: is of an earlier version; remove it, and it is made again")
        text_starts, given_counts = stored["starts"], stored["given"]
        text_sizes = np.diff(text_starts)
        is_valid = (
            text_starts[0] == 0 and text_starts[-1] == len(stored["ids"]) and (text_sizes > 0).all()
        )
        is_valid = is_valid and given_counts.shape == stored["cut"].shape == text_sizes.shape
        if (
            not is_valid
            or (given_counts < 0).any()
            or (given_counts > text_sizes).any()
            or (stored["ids"] < 0).any()
        ):
            raise ValueError("its parts do not belong together")
    except (OSError, LookupError, ValueError, TypeError, SafetensorError) as error:
        complaint = f"is no file of texts ({first_message_line(error)})"
        raise BadFile(f"{path}: {complaint}; remove it, and it is made again") from error
    prompt_columns = given_counts.tolist(), stored["cut"].tolist()
    text_spans = zip(text_starts[:-1], text_starts[1:], *prompt_columns, strict=True)
    return [
        Example(stored["ids"][text_start:text_end], given_count, is_cut)
        for text_start, text_end, given_count, is_cut in text_spans
    ]


def adapter_settings(config: TrainDLM) -> TrainAmateur:
    """Settings of adapters on all projections of the layers, whose output counts as it is."""
    return TrainAmateur(rank=config.rank, alpha=config.rank, layers=PROJECTIONS, seed=config.seed)


def check_sources(
    config: TrainDLM,
    init: LM | None,
    files: Sequence[Path],
    question_count: int,
    lists: int,
    tokenizer: Any,
) -> None:
    """Raises BadConfig where what is asked for does not go together."""
    of_init = question_count or files or lists or config.rank or config.cut
    if init is None and (of_init or config.objective == "certainty"):
        raise BadConfig(
            "answers, lists, own, rank, cut and objective=certainty need a model to begin with; "
            "give --init"
        )
    if question_count and "canvas" not in init.models["target"].caps:  # type: ignore[union-attr]
        raise BadConfig(
            "--own: a model that writes from left to right answers by `foretell train draft`; "
            "give its folder of answers"
        )
    if not files and not lists and tokenizer.get_vocab() != Lists(0).tokenizer.get_vocab():
        raise BadConfig(
            "lists without end need their own tokenizer, and the model of --init has another; give "
            "--answers, --text or --lists N"
        )


def train_dlm(
    out: Path,
    config: TrainDLM,
    init: LM | None = None,
    files: Sequence[Path] = (),
    own: int = 0,
    save_every: float = 300.0,
    quiet: bool = False,
    recipe: Mapping[str, Any] | None = None,
    telling: Telling = nullcontext,
    device: str = "cpu",
    lists: int = 0,
    workers: int = 0,
) -> dict[str, Any]:
    """Trains until `config.examples` are seen; writes OUT/model, and adapters also by themselves
    into OUT/lora; returns the report.

    `init`: the model to begin with, in float32, computed by torch; None: a new one. `files`: of
    answers to learn from, and `lists`: so many lists and puzzles in the tokens of `init`; neither:
    lists and puzzles without end. `own`: so many prompts are answered first by the model itself,
    and it learns from that; kept in OUT, as all that a run begins with. `device`: where a new model
    is trained; others are trained where they are. `workers`: processes that make batches, which
    takes as long as a step of a small model does on a GPU; 0: this one.
    """
    check_device(device)
    endless = Lists(config.seed)
    if init is None:
        tokenizer: Any = endless.tokenizer
        end, mask_id = tokenizer.eos_token_id, tokenizer.mask_token_id
        reader = new_model(config, len(tokenizer), mask_id, end, 512)
        reader.hf.to(device)
    else:
        reader, tokenizer = convert_model(init, config.block)
        if config.cut:
            shorten_model(reader.hf, config.cut)
        end = tokenizer.eos_token_id
    check_sources(config, init, files, own, lists, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    data: Examples = endless
    held_back = [Lists(config.seed + 1_000_003)[i] for i in range(256)]
    if files or own or lists:
        ends = (end,) if init is None else (end, *init.engine.eos)
        texts = answers_in(files, ends)
        if lists:
            assert init is not None
            texts += model_questions(init, lists, config.seed)
        if own:
            question_source: Examples = (
                Answers(texts, end, config.window, config.seed) if texts else endless
            )
            texts = keep_texts(
                out / "own.safetensors",
                lambda: own_answers(init, question_source, own, config, telling),
            )
        block = config.certain if config.objective == "certainty" else 0
        data = answers = Answers(texts, end, config.window, config.seed, block)
        held_back = answers.held_back
        if reader.longest:
            reader = replace(reader, longest=max(reader.longest, answers.longest))
    layers: dict[str, LoraLinear] = {}
    reader.hf.requires_grad_(True).train()
    if config.rank:
        layers = with_lora(reader.hf, adapter_settings(config))
        if config.precision == "bfloat16":
            for lora in layers.values():
                lora.base.to(torch.bfloat16)  # once, not before each product
    run = DLMRun(out, config, reader, data, workers)
    run.keep_recipe(recipe)
    run.run_steps(run.advance_on, save_every, quiet)
    size = run.parameter_count
    if layers:
        assert init is not None
        more_settings = {OURS: canvas_config(reader), "cut": config.cut}
        name = init.models["target"].name
        save_lora(
            out / "lora", layers, adapter_settings(config), name, torch.bfloat16, more_settings
        )
    merge_lora(reader.hf, layers)
    reader.hf.eval()
    export_canvases(reader, tokenizer, out / "model")
    report: dict[str, Any] = {
        "parameters": size,
        "examples_seen": config.steps * config.batch,
        "right": share_right(reader, held_back, config.micro),
        "settings": asdict(config),
        "recipe": recipe,
    }
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report
