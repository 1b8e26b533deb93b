"""Trains models that fill canvases: `foretell train dlm`.

A new small model for lists and puzzles, or a model that wrote from left to right and is made to see
both sides (`init`): its mask gets a row of its own in the embeddings, and its rows go on speaking
of the next position (shift 1), as Dream and DiffuLLaMA do it. Or, with `objective=certainty`, a
model that fills canvases learns to be sure of many tokens at once, on its own answers.

Sources: Nie et al., Large Language Diffusion Models (arXiv 2502.09992); Ye et al., Dream 7B (arXiv
2508.15487), section 3; Gong et al., Scaling Diffusion Language Models via Adaptation from
Autoregressive Models (arXiv 2410.17891), section 3; Chen et al., dParallel (arXiv 2509.26488).
Differs: attention is bidirectional from the first step, without annealing; of new models matrices
are trained with Muon; one end stands behind an answer, and behind some more, as many as are drawn,
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

from foretell.errors import BadConfig, BadFile, first_line
from foretell.models.decoder.adapted import LoraLinear
from foretell.models.diffusion.masked import OURS
from foretell.ops.devices import check_device
from foretell.ops.files import whole, write_text
from foretell.train import recipes
from foretell.train.amateur import TrainAmateur, merge_lora, with_lora
from foretell.train.amateur import save as save_lora
from foretell.train.answers import PIECE, read
from foretell.train.diffusion.canvases import Batches, Canvases, Examples, padded
from foretell.train.diffusion.converting import converted, shorten
from foretell.train.diffusion.lists import LONGEST, ROOM, Example, Lists, put_to
from foretell.train.diffusion.masking import (
    MASKS,
    Masked,
    Reader,
    certainty_loss,
    complements,
    drawn,
    masked_loss,
    right_at,
)
from foretell.train.draft import blocks
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
    masks: str = "rate"  # each token with a drawn chance, or a drawn `count` of them
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
        recipes.check(self, ranges)
        named = {"objective": OBJECTIVES, "masks": tuple(MASKS), "precision": PRECISIONS}
        for name, known in named.items():
            if getattr(self, name) not in known:
                raise BadConfig.field(name, getattr(self, name), f"one of {', '.join(known)}")
        if self.rank and self.matrix_rate:
            raise BadConfig.field("matrix_rate", self.matrix_rate, "0 where rank trains adapters")

    @property
    def steps(self) -> int:
        return max(1, self.examples // self.batch)


class Answers:
    """Answers with their prompts, of which one in HELD_BACK is left out; each round over the
    others is in another order. An end stands behind each that is not cut, and behind some more; or
    with `block` so many that they end with a block of that many positions, as canvases do.
    """

    def __init__(self, texts: Sequence[Example], end: int, window: int, seed: int, block: int = 0):
        ended = []
        for text in texts:
            answer = len(text.ids) - text.given
            count = block - answer % block if block else 1
            ended.append(text if text.cut else with_end(text, end, count))
        fitting = [text for text in ended if len(text.ids) <= window]
        self.held_back = fitting[::HELD_BACK]
        self.train = [text for i, text in enumerate(fitting) if i % HELD_BACK]
        self.end, self.window, self.seed, self.block = end, window, seed, block
        self.longest = max((len(text.ids) - text.given for text in self.train), default=0)
        if not self.train:
            raise BadConfig(
                f"{len(fitting)} answers of at most {window} tokens with their prompts are too "
                "few to learn from; give more, or raise window"
            )

    def __getitem__(self, number: int) -> Example:
        turn, place = divmod(number, len(self.train))
        order = np.random.default_rng((self.seed, turn)).permutation(len(self.train))
        text = self.train[order[place]]
        draw = np.random.default_rng((self.seed, turn, place))
        if text.cut or self.block or draw.random() >= ROOM:
            return text
        return with_end(text, self.end, int(draw.integers(0, self.window - len(text.ids) + 1)))


def with_end(text: Example, end: int, count: int = 1) -> Example:
    return Example(np.append(text.ids, [end] * count).astype(np.int64), text.given)


def texts_of(files: Sequence[Path], ends: Collection[int]) -> list[Example]:
    """The answers in files that `foretell train draft` and `foretell train head` write, without
    their end (one of `ends`), or cut where they have none; or the pieces of plain texts, whose
    first token alone is given.
    """
    found = []
    for text in (text for file in files for text in read(file)):
        tokens = text.tokens
        ended = bool(tokens[-1] in ends)
        cut = len(tokens) == PIECE if text.prompt == 1 else not ended
        found.append(Example(tokens[:-1] if ended else tokens, text.prompt, cut))
    return [text for text in found if len(text.ids) > text.given]


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
        mask: Any = partial(drawn, masks=config.masks, block=reader.block)
        if config.objective == "certainty":
            mask = partial(complements, block=config.certain)
        self.batches = Batches(data, mask, config.batch, config.micro, config.seed)
        super().__init__(folder, config, reader.hf, reader.hf.get_decoder().layers)

    def rated(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        c = self.config
        if not c.matrix_rate:
            learning = [p for p in self.model.parameters() if p.requires_grad]
            adam = torch.optim.AdamW(learning, lr=c.rate, betas=(0.9, 0.95), weight_decay=0.01)
            return [(adam, c.rate)]
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        muon = torch.optim.Muon(matrices, lr=c.matrix_rate, momentum=0.95, weight_decay=0.05)
        adam = torch.optim.AdamW(others, lr=c.rate, betas=(0.9, 0.95), weight_decay=0.0)
        return [(muon, c.matrix_rate), (adam, c.rate)]

    @cached_property
    def coming(self) -> Iterator[list[Canvases]]:
        """The batches of this step and the next ones."""
        return self.batches.of(range(self.step, self.config.steps), self.workers)

    def loss(self, canvases: Canvases) -> torch.Tensor:
        """(B,) of the texts of one forward."""
        c, device = self.config, self.reader.hf.device
        ids, masks = canvases.ids.to(device), canvases.masks
        with torch.autocast(device.type, torch.bfloat16, enabled=c.precision == "bfloat16"):
            if isinstance(masks, Masked):
                return masked_loss(self.reader, ids, masks.to(device))
            first, second, later = (part.to(device) for part in masks)
            return certainty_loss(self.reader, ids, (first, second, later), c.beta)

    def advance_on(self) -> float:
        """One optimiser step; returns the mean loss of its texts."""
        total = 0.0
        for canvases in next(self.coming):
            loss = self.loss(canvases).sum() / self.config.batch
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.update()
        return total


def own_answers(
    lm: Any, data: Examples, count: int, config: TrainDLM, telling: Telling = nullcontext
) -> list[Example]:
    """What a model that fills canvases answers to the prompts of these examples, one token a step
    and the surest first; without its end, which whoever learns from it adds, or cut.
    """
    found: list[Example] = []
    method = f"confidence:block={config.certain}"
    with telling() as tell:
        while len(found) < count:
            asked = [data[number] for number in range(len(found), min(count, len(found) + AT_ONCE))]
            prompts = [example.ids[: example.given].tolist() for example in asked]
            lengths = [min(config.longest, config.window - 1 - len(prompt)) for prompt in prompts]
            answers = lm.generate(prompts, method, max_new_tokens=lengths, temperature=0.0)
            for prompt, answer in zip(prompts, answers, strict=True):
                if answer.error:
                    raise answer.error
                ended = answer.finish_reason == "stop"
                tokens = answer.tokens[:-1] if ended else answer.tokens
                found.append(Example(np.array([*prompt, *tokens]), len(prompt), cut=not ended))
            if tell is not None:
                tell("answering", len(found), count)
    return found


def measured(reader: Reader, texts: Sequence[Example], micro: int) -> dict[str, float]:
    """The share of masked tokens that the model has right, by the share that is masked."""
    found = {}
    for rate in RATES:
        right = count = 0
        for group in blocks([len(text.ids) for text in texts], micro, 0):
            ids, answers = padded([texts[i] for i in group])
            more = right_at(reader, ids, answers, rate, [(0, i) for i in group])
            right, count = right + more[0], count + more[1]
        found[f"{rate:g}"] = round(right / max(1, count), 4)
    return found


def about_canvases(reader: Reader) -> dict[str, int]:
    """What a folder's configuration says of them."""
    about = {"mask_id": reader.mask_id, "shift": reader.shift, "block": reader.block}
    return about | ({"longest": reader.longest} if reader.longest else {})


def export(reader: Reader, tokenizer: Any, folder: Path) -> None:
    """Writes a folder that `foretell.load` opens as a model that fills canvases, in bfloat16."""
    hf = reader.hf
    setattr(hf.config, OURS, about_canvases(reader))
    before = {name: p.detach().clone() for name, p in hf.state_dict().items()}
    hf.to(torch.bfloat16).save_pretrained(folder)
    hf.to(torch.float32).load_state_dict(before)
    tokenizer.save_pretrained(folder)


def kept(path: Path, made: Callable[[], list[Example]]) -> list[Example]:
    """The texts in a file, which are made and written first where it is not there.

    Raises BadFile for one of an earlier version, which does not say where answers were cut.
    """
    if not path.exists():
        texts = made()
        lengths = [len(text.ids) for text in texts]
        arrays = {
            "ids": np.concatenate([text.ids for text in texts]).astype(np.int64),
            "starts": np.array([0, *lengths]).cumsum(),
            "given": np.array([text.given for text in texts]),
            "cut": np.array([text.cut for text in texts]),
        }
        with whole(path) as part:
            save_file(arrays, part)
    try:
        found = load_file(path)
        if "cut" not in found:
            raise BadFile(f"{path}: is of an earlier version; remove it, and it is made again")
        starts, prompts = found["starts"], found["given"]
        sizes = np.diff(starts)
        fits = starts[0] == 0 and starts[-1] == len(found["ids"]) and (sizes > 0).all()
        fits = fits and prompts.shape == found["cut"].shape == sizes.shape
        if not fits or (prompts < 0).any() or (prompts > sizes).any() or (found["ids"] < 0).any():
            raise ValueError("its parts do not belong together")
    except (OSError, LookupError, ValueError, TypeError, SafetensorError) as error:
        what = f"is no file of texts ({first_line(error)})"
        raise BadFile(f"{path}: {what}; remove it, and it is made again") from error
    about = prompts.tolist(), found["cut"].tolist()
    spans = zip(starts[:-1], starts[1:], *about, strict=True)
    return [Example(found["ids"][low:high], given, cut) for low, high, given, cut in spans]


def adapters(config: TrainDLM) -> TrainAmateur:
    """Their settings: on all projections of the layers, and as much as they are."""
    return TrainAmateur(rank=config.rank, alpha=config.rank, layers=PROJECTIONS, seed=config.seed)


def check(
    config: TrainDLM,
    init: LM | None,
    files: Sequence[Path],
    own: int,
    lists: int,
    tokenizer: Any,
) -> None:
    """Raises BadConfig where what is asked for does not go together."""
    of_init = own or files or lists or config.rank or config.cut
    if init is None and (of_init or config.objective == "certainty"):
        raise BadConfig(
            "answers, lists, own, rank, cut and objective=certainty need a model to begin with; "
            "give --init"
        )
    if own and "canvas" not in init.models["target"].caps:  # type: ignore[union-attr]
        raise BadConfig(
            "--own: a model that writes from left to right answers by `foretell train draft`; "
            "give its folder of answers"
        )
    if not files and not lists and tokenizer.get_vocab() != Lists(0).tokenizer.get_vocab():
        raise BadConfig(
            "lists without end need their own tokenizer, and the model of --init has another; give "
            "--answers, --text or --lists N"
        )


def train(
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
        reader, tokenizer = converted(init, config.block)
        if config.cut:
            shorten(reader.hf, config.cut)
        end = tokenizer.eos_token_id
    check(config, init, files, own, lists, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    data: Examples = endless
    held_back = [Lists(config.seed + 1_000_003)[i] for i in range(256)]
    if files or own or lists:
        ends = (end,) if init is None else (end, *init.engine.eos)
        texts = texts_of(files, ends)
        if lists:
            assert init is not None
            texts += put_to(init, lists, config.seed)
        if own:
            asked: Examples = Answers(texts, end, config.window, config.seed) if texts else endless
            texts = kept(
                out / "own.safetensors", lambda: own_answers(init, asked, own, config, telling)
            )
        block = config.certain if config.objective == "certainty" else 0
        data = answers = Answers(texts, end, config.window, config.seed, block)
        held_back = answers.held_back
        if reader.longest:
            reader = replace(reader, longest=max(reader.longest, answers.longest))
    layers: dict[str, LoraLinear] = {}
    reader.hf.requires_grad_(True).train()
    if config.rank:
        layers = with_lora(reader.hf, adapters(config))
        if config.precision == "bfloat16":
            for lora in layers.values():
                lora.base.to(torch.bfloat16)  # once, not before each product
    run = DLMRun(out, config, reader, data, workers)
    run.keep(recipe)
    run.through(run.advance_on, save_every, quiet)
    size = run.size
    if layers:
        assert init is not None
        more = {OURS: about_canvases(reader), "cut": config.cut}
        name = init.models["target"].name
        save_lora(out / "lora", layers, adapters(config), name, torch.bfloat16, more)
    merge_lora(reader.hf, layers)
    reader.hf.eval()
    export(reader, tokenizer, out / "model")
    report: dict[str, Any] = {
        "parameters": size,
        "examples_seen": config.steps * config.batch,
        "right": measured(reader, held_back, config.micro),
        "settings": asdict(config),
        "recipe": recipe,
    }
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report
