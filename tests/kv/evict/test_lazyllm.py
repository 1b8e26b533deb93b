"""LazyLLM against a llama by hand, one token and one layer at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretell.core.model import Computed
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.own.layerskip import Layerskip
from foretell.errors import BadConfig, Unsupported
from foretell.kv.evict.lazyllm import Dropping, Lazyllm
from foretell.models.decoder.decoder import Decoder
from foretell.spec import build_cache_policy
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests.cache.users import by_chunks
from tests.kv.by_hand import ByHand
from tests.kv.policies import PROMPT, drafted, run, target
from tests.kv.twin import by_engine

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "lazyllm:every=3"
LARGE_SPEC = "lazyllm:rate=0"

TOKENS = 14
SMALL = Lazyllm(at="0.3/0.6", rate=0.4, every=3)
STEPS = Lazyllm(at="0.6", rate=0.5)
ENDS = {SMALL: (1, 2, 3), STEPS: (2, 3)}


class Loops:
    """Tokens by their places. `slip` names a mistake."""

    def __init__(self, kv: Lazyllm, slip: str = "") -> None:
        self.model = ByHand()
        self.kv, self.slip, self.ends = kv, slip, ENDS[kv]
        self.rows: list[dict[int, Any]] = [{} for _ in range(self.model.layers)]
        self.entering: list[dict[int, torch.Tensor]] = [{} for _ in self.ends]
        self.read: list[list[int]] = [[] for _ in self.ends]
        # By the text's length, of each stage what is read, what has rows, and what is stored.
        self.then: dict[int, list[tuple[list[int], list[int], dict[int, torch.Tensor]]]] = {}

    def passes(self, place: int, stage: int, read: Sequence[int]) -> dict[int, float]:
        """Takes a token through a stage; what it gives in the last layer to those that it reads."""
        h = self.entering[stage].pop(place)
        seen = [other for other in read if other < place] + [place]
        weights = torch.empty(0)
        for layer in range(self.ends[stage - 1] if stage else 0, self.ends[stage]):
            q, k, v = self.model.rows(layer, h, [place])
            assert place not in self.rows[layer], "no token twice in a layer"
            self.rows[layer][place] = k, v
            held = zip(*(self.rows[layer][other] for other in seen), strict=True)
            keys, values = (torch.cat(parts, 1) for parts in held)
            mask = torch.ones(1, len(seen), dtype=torch.bool)
            h, weights = self.model.through(layer, h, q, keys, values, mask)
        if stage + 1 < len(self.ends):
            self.entering[stage + 1][place] = h
        self.h = h
        return dict(zip(seen, weights[:, 0].mean(0).tolist(), strict=True))

    def goes_on(self, kept: Sequence[int], given: dict[int, float]) -> list[int]:
        """Those of the tokens, ascending, that are not dropped."""
        drop = int(self.kv.rate * len(kept))
        order = sorted(kept[:-1], key=lambda place: (given[place], place))
        if self.slip == "the most":
            order.reverse()
        return sorted([*order[drop:], kept[-1]])

    def token(self, place: int, token: int, chooses: bool) -> None:
        self.entering[0][place] = self.model.embed([token])
        given = self.passes(place, 0, range(place))
        kept = [*range(place + 1)]
        for stage in range(1, len(self.ends)):
            if not chooses:
                self.read[stage].append(place)
                self.passes(place, stage, self.read[stage])
                continue
            if self.slip == "those there" and self.read[stage]:
                kept = [at for at in kept if at in self.rows[self.ends[stage] - 1]] + kept[-1:]
            kept = self.goes_on(kept, given)
            for other in kept:
                if other not in self.rows[self.ends[stage] - 1]:
                    given = self.passes(other, stage, kept)
            self.read[stage] = list(kept)
        known = [sorted(self.rows[end - 1]) for end in self.ends]
        stages = zip(map(list, self.read), known, map(dict, self.entering), strict=True)
        self.then[place + 1] = list(stages)

    def text(self, prompt: Sequence[int], tokens: int) -> list[int]:
        for place, token in enumerate(prompt[:-1]):
            self.entering[0][place] = self.model.embed([token])
            self.passes(place, 0, range(place))
        text = list(prompt)
        while len(text) < len(prompt) + tokens:
            place = len(text) - 1
            self.token(place, text[-1], (place + 1 - len(prompt)) % self.kv.every == 0)
            text.append(self.model.likeliest(self.h[0]))
        return text[len(prompt) :]


def agree(kv: Lazyllm, slip: str = "") -> bool:
    """In the text, in what is read in the end, and in all rows that are known."""
    policies: list[Any] = []
    text, held = by_engine(kv, PROMPT, TOKENS, policies)
    loops = Loops(kv, slip)
    if text != loops.text(PROMPT, TOKENS):
        return False
    length, policy = policies[-1]
    new = [*range(policy.length, length)]
    for number, stage in enumerate(policy.stages, 1):
        read, known, stored = loops.then[length][number]
        if [*stage.read_positions.tolist(), *new] != read or stage.places.tolist() != sorted(
            stored
        ):
            return False
        if [*stage.has_rows.nonzero()[:, 0].tolist(), *new] != known:
            return False
        for place, state in zip(stage.places.tolist(), stage.states, strict=True):
            assert torch.allclose(state, stored[place][0], atol=1e-5)
        for layer in range(loops.ends[number - 1], loops.ends[number]):
            for place in known:
                pairs = zip(held[length][layer], loops.rows[layer][place], strict=True)
                assert all(torch.allclose(a[:, place], b[:, 0], atol=1e-5) for a, b in pairs)
    return True


@pytest.mark.parametrize("kv", [SMALL, STEPS])
@pytest.mark.parametrize("piece", [512, 2])
@torch.inference_mode()
def test_it_writes_the_text_of_loops_and_holds_their_rows_and_states(
    kv: Lazyllm, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.kv.evict.layer_skipping.PIECE", piece)
    assert agree(kv)


@pytest.mark.parametrize("slip", ["the most", "those there"])
@torch.inference_mode()
def test_a_slip_is_noticed(slip: str) -> None:
    assert not agree(SMALL, slip)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("kv", [SMALL, STEPS])
def test_no_token_is_computed_twice_in_a_layer_and_some_are_revived(
    kv: Lazyllm, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: Counter[tuple[int, int]] = Counter()
    whole = Decoder._compute_jobs

    def counting(self: Any, jobs: Any, taps: Any) -> Computed:
        for job in jobs:
            layers = range(len(self.layout)) if job.layers is None else job.layers
            passed.update((layer, place) for layer in layers for place in job.positions)
        return whole(self, jobs, taps)

    monkeypatch.setattr(Decoder, "_compute_jobs", counting)
    run(target(), [PROMPT], kv, tokens=1, plan=by_chunks(chunk))
    count = len(PROMPT)
    at_first = Counter(layer for layer, _ in passed)
    for layer in range(3):
        assert at_first[layer] == count
        count -= int(kv.rate * count) if layer + 1 in ENDS[kv] else 0
    passed.clear()
    run(target(), [PROMPT], kv, tokens=TOKENS, plan=by_chunks(chunk))
    assert set(passed.values()) == {1}
    later = Counter(layer for layer, _ in passed)
    assert later[2] > at_first[2] + TOKENS - 1  # tokens of the prompt were revived
    assert later[0] == len(PROMPT) + TOKENS - 1


def test_nothing_dropped_is_the_full_cache_bit_by_bit() -> None:
    want, full = by_engine(None, PROMPT, TOKENS)
    text, held = by_engine(Lazyllm(rate=0), PROMPT, TOKENS)
    assert text == want and held.keys() == full.keys()
    for length, rows in held.items():
        for ours, theirs in zip(rows, full[length], strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_short_prompts_are_prompts() -> None:
    for prompt in (PROMPT[:1], PROMPT[:2]):
        (live,) = run(target(), [prompt], STEPS, tokens=6)
        (want,) = run(target(), [prompt], STEPS, drafted(live.ctx.output, 3), tokens=6)
        assert live.error is None and live.ctx.output == want.ctx.output
        assert live.ctx.output == Loops(STEPS).text(prompt, 6)


def forward(cache: Any, tokens: list[int], chunk: int = 1000, **ask: Any) -> Any:
    done, reply = False, None
    while not done:
        job, done = cache.prepare(Ask(TokenTree(tokens[-1]), **ask), tokens, chunk)
        (reply,) = target().forward([job])
    return reply


@torch.inference_mode()
def test_forks_choose_by_themselves_and_asking_again_changes_nothing() -> None:
    texts = [PROMPT[:9] + PROMPT[:9:-1], PROMPT[:9] + [5] * 11]
    rows = []
    for alone in (True, False):
        cache = target().cache()
        cache.use(SMALL.build_policy(target()), 12)
        forward(cache, texts[0][:9], 4)
        for text in texts:
            fork = cache.fork()
            if alone:
                fork.forget()
            for length in (12, 13, 15, 16, 18):
                forward(fork, text[:length], rows=[] if alone else None)
                rows.append(forward(fork, text[:length], 5).logits)
            assert isinstance(fork.policy, Dropping) and fork.policy.waiting is None
    half = len(rows) // 2
    for ours, theirs in zip(rows[:half], rows[half:], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(rows[4], rows[9], atol=1e-2)


@pytest.mark.parametrize(("exit_layer", "every"), [(1, 5), (2, 3)])
def test_drafts_of_first_layers_leave_the_text_as_it_is(exit_layer: int, every: int) -> None:
    kv = Lazyllm(at="0.3/0.6", rate=0.4, every=every)
    (want,) = run(target(), [PROMPT], kv)
    (live,) = run(target(), [PROMPT], kv, Speculative(Layerskip(exit_layer=exit_layer), nodes=4))
    assert live.error is None and live.ctx.output == want.ctx.output


@torch.inference_mode()
def test_what_a_forward_chose_whose_rows_were_lost_is_forgotten() -> None:
    """A part of the layers runs over the same token, and its rows replace those of the whole."""
    rows = []
    for lost in (False, True):
        cache = target().cache()
        cache.use(SMALL.build_policy(target()), len(PROMPT))
        forward(cache, PROMPT)
        if lost:
            forward(cache, PROMPT, layers=(0,))
        cache.commit([*PROMPT, 1])
        assert isinstance(cache.policy, Dropping)
        assert bool(cache.policy.stages) == (not lost) and not cache.policy.pending_stages
        rows.append(forward(cache, [*PROMPT, 1]).logits)
    assert torch.allclose(*rows, atol=1e-5)


@torch.inference_mode()
def test_the_states_of_the_last_token_are_its_own_in_every_layer() -> None:
    cache = target().cache()
    cache.use(SMALL.build_policy(target()), len(PROMPT))
    reply = forward(cache, PROMPT, taps=(0, 1, 2, 3))
    states = torch.stack([reply.hidden[tap][-1] for tap in (0, 1, 2, 3)])
    assert torch.allclose(target().head_rows(states[3:]), reply.logits, atol=1e-5)
    assert torch.pdist(states).min() > 1e-3


@pytest.mark.parametrize(
    ("field", "value"), [("at", "0.5/0.3"), ("at", "half"), ("at", "0.5/1"), ("at", "")]
)
def test_bad_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=f"lazyllm:{field}"):
        Lazyllm(**{field: value})


def test_the_depths_are_settings_of_the_command_line_too() -> None:
    kv = build_cache_policy("lazyllm:at=0.34/0.67,rate=0.2")
    policy = kv.build_policy(target())
    assert isinstance(policy, Dropping) and policy.ends == (1, 2, 3) and policy.rate == 0.2
    with pytest.raises(Unsupported, match="layers or more that can be run one by one"):
        kv.build_policy(Toy(30))
