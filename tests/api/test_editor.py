"""A text that is edited: positions as if it were read anew, and only what is new is computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import foretell
from foretell import LM
from foretell.api.editor import Editor
from foretell.backends.openvino import OpenVinoBackend
from foretell.cache.policy import Segment
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.engine import prefix_cache as reuse
from foretell.errors import BadConfig, BadModel, PromptTooLong, Unsupported
from foretell.models.decoder.packed import pack_layers
from tests import tiny
from tests.cache.test_backends import missing

TEXT = "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n"
NEAR = 1e-12
GREEDY = {"max_new_tokens": 12, "temperature": 0.0}
Pair = tuple[list[torch.Tensor], list[torch.Tensor]]  # keys and values of each layer (KV, n, D)


@cache
def wide() -> LM:
    return tiny.lm(torch.float64, draft=False)


@cache
def roomy() -> LM:
    """For texts of some thousand tokens."""
    return foretell.wrap(tiny.llama(max_position_embeddings=4096), tiny.tokenizer())


def apart(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The largest difference."""
    assert [part.shape for part in one] == [part.shape for part in other]
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def bits(segment: Segment) -> list[torch.Tensor]:
    return [part.clone() for part in (*segment.k, *segment.v)]


def change(editor: Editor, draw: random.Random) -> None:
    """Some edit: it inserts, deletes or replaces, anywhere."""
    start, stop = sorted(draw.randint(0, len(editor.text)) for _ in range(2))
    stop = min(stop, start + draw.choice((0, 1, 9)))
    editor.edit(start, stop, draw.choice(("", "b", "plus_one", "def ", "漢字🙂", "\n\n    ")))


def counted(lm: LM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward of the target computes from now on."""
    target = lm.models["target"]
    forward = target.forward
    sizes: list[int] = []

    def noted(jobs: Any) -> Any:
        sizes.append(sum(len(job.tokens) for job in jobs))
        return forward(jobs)

    monkeypatch.setattr(target, "forward", noted)
    return sizes


# --- rows


@pytest.mark.parametrize("seed", range(4))
def test_keys_of_layer_0_are_those_of_the_text_read_anew(seed: int) -> None:
    """They are made of a token and its position alone, so whatever was edited they are the same."""
    draw = random.Random(seed)
    editor = wide().editor(TEXT, "plain")
    for _ in range(5):
        change(editor, draw)
        anew = wide().editor(editor.text, "plain").segment
        assert editor.tokens == wide().encode(editor.text) == list(anew.tokens)
        assert apart(editor.segment.k[:1], anew.k[:1]) < NEAR
        assert apart(editor.segment.v[:1], anew.v[:1]) < NEAR
    assert apart(editor.segment.k, anew.k) > 0.1, "rows after an edit tell of the text before it"


def test_rows_that_are_spliced_and_not_turned_would_be_noticed() -> None:
    """The slip: the baseline of the paper, rows after an edit as they stood before it."""
    editor = wide().editor(TEXT, "plain")
    editor.edit(4, 7, "plus_one")
    anew = wide().editor(editor.text, "plain").segment
    assert apart([editor._rows.k[0]], anew.k[:1]) > 0.1


def by_hand(hf: PreTrainedModel, rows: Pair, tokens: Sequence[int], start: int) -> Pair:
    """What transformers' own forward makes of tokens from `start` on, over the first rows."""
    held: Any = DynamicCache()
    for layer, (k, v) in enumerate(zip(*rows, strict=True)):
        held.update(k[None, :, :start], v[None, :, :start], layer)
    ids = torch.tensor([list(tokens)])
    positions = torch.arange(start, start + len(tokens))[None]
    with torch.no_grad():
        hf(input_ids=ids, position_ids=positions, past_key_values=held, use_cache=True)
    return [one.keys[0] for one in held.layers], [one.values[0] for one in held.layers]


def turned(k: torch.Tensor, steps: int, theta: float = 10000.0) -> torch.Tensor:
    """A key (D,) so many positions on, pair by pair; angles are rounded as transformers does."""
    half = len(k) // 2
    out = k.clone()
    for i in range(half):
        angle = torch.tensor(steps * theta ** (-i / half), dtype=torch.float64)
        c, s = torch.cos(angle), torch.sin(angle)
        out[i], out[i + half] = k[i] * c - k[i + half] * s, k[i + half] * c + k[i] * s
    return out


def test_rows_are_those_that_transformers_computes_and_a_loop_turns() -> None:
    """One edit after the other, all layers."""
    hf = tiny.llama().double()
    lm = foretell.wrap(hf, tiny.tokenizer())
    editor = lm.editor(TEXT, "plain")
    none = [torch.zeros(2, 0, 8, dtype=torch.float64)] * 2
    rows = by_hand(hf, (none, none), editor.tokens, 0)
    for start, stop, new in ((4, 7, "plus_one"), (0, 0, "# sum\n"), (20, 31, ""), (3, 4, " x")):
        before = len(editor.tokens)
        done = editor.edit(start, stop, new)
        assert done.stop + done.kept == before
        end = done.start + done.computed
        first = by_hand(hf, rows, editor.tokens[done.start : end], done.start)
        keys, values = [], []
        for layer in range(2):
            behind = rows[0][layer][:, done.stop :].clone()
            for head in range(2):
                for place in range(done.kept):
                    behind[head, place] = turned(behind[head, place], end - done.stop)
            keys.append(torch.cat([first[0][layer], behind], 1))
            values.append(torch.cat([first[1][layer], rows[1][layer][:, done.stop :]], 1))
        rows = keys, values
    # Angles of the loop are not rounded to float32.
    assert apart(editor.segment.k, rows[0]) < 1e-4 and apart(editor.segment.v, rows[1]) < 1e-4
    assert apart(editor.segment.k, [layer.flip(1) for layer in rows[0]]) > 0.1


def test_text_that_is_added_behind_is_computed_as_if_all_were_read() -> None:
    editor = wide().editor(TEXT[:30], "plain")
    for end in (31, 40, len(TEXT)):
        editor.edit(len(editor.text), len(editor.text), TEXT[len(editor.text) : end])
        anew = wide().editor(editor.text, "plain")
        assert editor.text == TEXT[:end] and editor.tokens == anew.tokens
        assert apart(bits(editor.segment), bits(anew.segment)) < NEAR
    assert editor.complete(**GREEDY).tokens == wide().generate(TEXT, "plain", **GREEDY).tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_undo_restores_every_bit(dtype: torch.dtype) -> None:
    draw = random.Random(3)
    editor = tiny.lm(dtype, draft=False).editor(TEXT, "plain")
    seen = []
    for _ in range(6):
        seen.append((editor.text, editor.tokens, bits(editor.segment)))
        change(editor, draw)
    assert apart(bits(editor.segment)[:1], bits(editor.segment)[:1]) == 0
    while seen:
        editor.undo()
        text, tokens, rows = seen.pop()
        assert (editor.text, editor.tokens) == (text, tokens)
        assert all(map(torch.equal, bits(editor.segment), rows))
    with pytest.raises(BadConfig, match="no edit to take back"):
        editor.undo()


def test_keys_that_are_turned_there_and_back_have_lost_bits() -> None:
    """The slip: each turn begins with what the last one left."""
    editor = tiny.lm(torch.bfloat16, draft=False).editor(TEXT, "plain")
    keys, at = list(editor.segment.k), torch.arange(len(editor.tokens))
    with torch.inference_mode():
        there = editor._move(keys, at, at + 3)
        back = editor._move(there, at + 3, at)
    assert not all(map(torch.equal, back, keys))


# --- what is computed


def test_an_edit_computes_the_tokens_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = roomy()
    text = "".join(f"def add_{i}(a, b):\n    return a + b * {i}\n\n\n" for i in range(60))
    sizes = counted(lm, monkeypatch)
    editor = lm.editor(text, "plain")
    total = len(editor.tokens)
    # Two tokens alone show how keys turn.
    assert sizes[:2] == [1, 1] and sum(sizes[2:]) == total > 1000 and len(sizes) > 3
    place = text.index("add_7(")
    for start, stop, new in ((place, place + 5, "plus_seven"), (0, 0, "import math\n"), (9, 9, "")):
        sizes.clear()
        done = editor.edit(start, stop, new)
        assert sum(sizes) == done.computed
        assert done.start + done.computed + done.kept == len(editor.tokens)
        assert done.saved >= 0.85 and done.saved == 1 - done.computed / len(editor.tokens)
    sizes.clear()
    editor.undo()
    assert sizes == []
    editor.complete(max_new_tokens=3)
    assert sizes == [1, 1, 1], "no token of the text but the last one is computed again"


def test_tokens_that_an_edit_cuts_are_computed_anew() -> None:
    """Whatever is cut in the middle, by the tokenizer's own account, is among what is replaced."""
    coder = tiny.tokenizer()
    lm = tiny.lm(draft=False)
    cuts = 0
    for place in range(1, len(TEXT), 2):
        editor = lm.editor(TEXT, "plain")
        spans = coder(TEXT, return_offsets_mapping=True)["offset_mapping"]
        done = editor.edit(place, place, "ß")
        for token, (first, end) in enumerate(spans):
            if first < place < end:
                cuts += 1
                assert done.start <= token < done.stop
        assert done.computed >= len(lm.encode("ß", special=False)) - 1
    assert cuts > 3


def test_an_edit_that_changes_nothing_computes_nothing() -> None:
    editor = wide().editor(TEXT, "plain")
    before = bits(editor.segment)
    done = editor.edit(4, 7, "add")
    assert (done.computed, done.kept, done.saved) == (0, 0, 1.0)
    assert all(map(torch.equal, bits(editor.segment), before))
    editor.undo()
    assert editor.text == TEXT


def test_a_replacement_of_the_same_length_leaves_the_bits_behind_it() -> None:
    editor = wide().editor(TEXT, "plain")
    before = bits(editor.segment)
    done = editor.edit(TEXT.index("1"), TEXT.index("1") + 1, "7")
    assert done.computed == 1 and done.kept > 3
    for old, new in zip(before, bits(editor.segment), strict=True):
        assert torch.equal(old[:, done.stop :], new[:, done.stop :])


def test_all_of_a_text_can_be_replaced() -> None:
    editor = wide().editor(TEXT, "plain")
    done = editor.edit(0, len(TEXT), "Q")
    assert (done.start, done.computed, done.kept) == (0, 1, 0)
    assert editor.complete(**GREEDY).tokens == wide().generate("Q", "plain", **GREEDY).tokens
    editor.edit(0, 1, "")
    assert editor.tokens == wide().encode("")


# --- completions


@pytest.mark.parametrize("method", ["ngram:nodes=6", "draft:nodes=6", "token-recycling:nodes=6"])
def test_drafts_change_nothing_of_what_is_written(method: str) -> None:
    lm = tiny.lm(torch.float64)
    texts = []
    for spec in ("plain", method):
        editor = lm.editor(TEXT * 2, spec)
        editor.edit(4, 7, "plus_one")
        texts.append(editor.complete(**GREEDY).tokens)
        streamed = [token for piece in editor.stream(**GREEDY) for token in piece.tokens]
        assert streamed == texts[-1]
    assert texts[0] == texts[1]


def test_a_head_reads_the_states_of_the_text(tmp_path: Path) -> None:
    lm = tiny.lm(torch.float64, draft=False)
    target = lm.models["target"]
    head = build_head("eagle", target_shape(target), {})
    head.take_weights(target)
    save_head(head, None, tmp_path, target, {})
    editor = lm.editor(TEXT, f"eagle:head={tmp_path},nodes=6")
    editor.edit(4, 7, "plus_one")
    plain = lm.editor(TEXT, "plain")
    plain.edit(4, 7, "plus_one")
    out = editor.complete(**GREEDY)
    assert out.tokens == plain.complete(**GREEDY).tokens and out.stats.drafted
    assert editor.segment.states and not plain.segment.states
    with pytest.raises(BadConfig, match="lack them"):
        lm.generate(plain.tokens, editor.method, prefix=prefix_of(plain), **GREEDY)


def prefix_of(editor: Editor) -> Segment:
    """What its completions begin with."""
    prefix: Segment = editor._call_options({})["prefix"]
    return prefix


def test_rows_of_an_edited_text_are_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of texts that end are kept for texts that begin alike, but not these."""

    def written() -> list[int]:
        lm = tiny.lm(torch.float64, draft=False)
        lm.limit(prefixes=1 << 24)
        editor = lm.editor(TEXT, "plain")
        editor.edit(4, 7, "plus_one")
        edited = editor.complete(**GREEDY).tokens
        out: list[int] = lm.generate(editor.text, "plain", **GREEDY).tokens
        assert edited != right, "this edit shows nothing"
        return out

    right = wide().generate(TEXT.replace("add", "plus_one", 1), "plain", **GREEDY).tokens
    assert written() == right
    shares = reuse.Reuse._shares_rows

    def slip(live: Any, cache: Any) -> bool:
        live.ctx.request.prefix = None
        return shares(live, cache)

    monkeypatch.setattr(reuse.Reuse, "_shares_rows", staticmethod(slip))
    assert written() != right


def test_completions_that_run_are_not_touched_by_edits() -> None:
    editor = wide().editor(TEXT, "plain")
    want = editor.complete(**GREEDY).tokens
    pieces = editor.stream(**GREEDY)
    got = list(next(pieces).tokens)
    editor.edit(0, 4, "")
    assert [*got, *(token for piece in pieces for token in piece.tokens)] == want


@pytest.mark.skipif(missing("openvino"), reason="OpenVINO is not installed")
def test_who_reads_no_shared_rows_copies_them() -> None:
    lm, other = tiny.lm(draft=False), tiny.lm(draft=False)
    target: Any = lm.models["target"]
    target.use(OpenVinoBackend)
    assert not target.reads_segments
    editors = [one.editor(TEXT, "plain") for one in (lm, other)]
    for editor in editors:
        editor.edit(4, 7, "plus_one")
    first, second = (editor.segment for editor in editors)
    assert apart(bits(first), bits(second)) < 1e-4
    assert editors[0].complete(**GREEDY).tokens == editors[1].complete(**GREEDY).tokens


# --- what is refused


@pytest.mark.parametrize(
    ("start", "stop", "new", "message"),
    [
        (5, 900, "x", "edit 5 to 900: the text has 51 characters; give two places from 0 to 51"),
        (-1, 3, "x", "edit -1 to 3: "),
        (7, 3, "x", "edit 7 to 3: "),
        (0, 1.0, "x", "edit 0 to 1.0: "),
        (0, 1, b"x", "new=b'x': must be a text"),
        (0, 1, "\ud800", "half a character"),
        (0, 0, "漢" * 60, "and tiny holds 128; shorten it"),
    ],
)
def test_an_edit_that_cannot_be_changes_nothing(
    start: Any, stop: Any, new: Any, message: str
) -> None:
    editor = tiny.lm(draft=False).editor(TEXT, "plain")
    before = (editor.text, editor.tokens, editor.segment)
    with pytest.raises((BadConfig, PromptTooLong)) as caught:
        editor.edit(start, stop, new)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert before == (editor.text, editor.tokens, editor.segment)
    with pytest.raises(BadConfig, match="no edit to take back"):
        editor.undo()


def test_models_without_such_rows_are_refused() -> None:
    learned = foretell.wrap(tiny.gpt2(), tiny.tokenizer())
    with pytest.raises(Unsupported, match=r"editor cannot run on .*positions that are rotations"):
        learned.editor(TEXT, "plain")
    packed = tiny.llama(intermediate_size=64)
    pack_layers(packed, "int8")
    exact = foretell.wrap(packed, tiny.tokenizer(), exact_bits=True)
    with pytest.raises(Unsupported, match="leave exact_bits out"):
        exact.editor(TEXT, "plain")
    with pytest.raises(BadModel, match="no tokenizer"):
        foretell.wrap(tiny.llama()).editor(TEXT, "plain")


def test_arguments_that_an_editor_cannot_honour_are_refused() -> None:
    lm = wide()
    with pytest.raises(BadConfig, match="text=3: must be a text"):
        lm.editor(3, "plain")  # type: ignore[arg-type]
    with pytest.raises(foretell.ForetellError, match="unknown method"):
        lm.editor(TEXT, "plian")
    editor = lm.editor(TEXT, "plain")
    with pytest.raises(BadConfig, match="an editor completes by its own"):
        editor.complete(method="ngram")
    with pytest.raises(BadConfig, match="leave kv out"):
        editor.complete(kv="h2o:budget=16")
    with pytest.raises(BadConfig, match="prefix='x': must be rows that an editor has made"):
        lm.generate(TEXT, "plain", prefix="x")
    with pytest.raises(BadConfig, match="does not go on after"):
        lm.generate("another text", "plain", prefix=editor.segment)
    with pytest.raises(BadConfig, match="does not go on after"):
        lm.generate(editor.tokens, "plain", prefix=editor.segment)


def test_bytes_are_counted() -> None:
    editor = wide().editor(TEXT, "plain")
    row = wide().models["target"].row_bytes
    assert editor.bytes == row * len(editor.tokens)
    done = editor.edit(0, 4, "")
    twice = row + row // 2  # keys as they were computed, and where they are now
    removed = done.stop - done.start
    assert removed and editor.bytes == twice * len(editor.tokens) + row * removed
