"""Older tokens in blocks, by plain loops over tokens: what infllm and actqkv are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foretell.kv.select.infllm import Infllm
from tests.kv.driving import GROUPS, HEADS, LAYERS, SCALE, TIMES, WIDTH, drive, rows_of

FREQUENCIES = torch.tensor([1.0, 0.6, 0.3, 0.1], dtype=torch.float64)


def turn(keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """As models/decoder/turning.py says, for halves of WIDTH / 2 channels."""
    angles = by.reshape(-1, keys.shape[1])[..., None].double() * FREQUENCIES
    low, high = keys.double().chunk(2, -1)
    cosines, sines = angles.cos(), angles.sin()
    turned = torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1)
    return turned.to(keys.dtype)


def at(x: torch.Tensor, by: int) -> torch.Tensor:
    """One vector (D,), moved by so many positions, as complex numbers."""
    low, high = x.chunk(2)
    moved = torch.complex(low, high) * torch.polar(
        torch.ones(WIDTH // 2).double(), by * FREQUENCIES
    )
    return torch.cat([moved.real, moved.imag])


@dataclass
class Block:
    places: list[int]
    key: list[torch.Tensor]  # that it is found by, of each key head


@dataclass
class Layer:
    initial: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    near: list[int] = field(default_factory=list)
    got: dict[int, list[float]] = field(default_factory=dict)  # of those near, by key head
    span: list[torch.Tensor] = field(default_factory=list)  # queries (H, D) where they see far
    chosen: list[int] = field(default_factory=list)
    known: Any = None  # what a subclass likes; replaced, never changed

    def copy(self) -> Layer:
        got = {place: [*given] for place, given in self.got.items()}
        lists = (self.initial, self.blocks, self.near)
        initial, blocks, near = ([*one] for one in lists)
        return Layer(initial, blocks, near, got, [*self.span], [*self.chosen], self.known)


class Twin:
    """Reads texts that begin with a prompt of so many tokens; `kv` has the settings."""

    def __init__(self, kv: Any, prompt: int):
        self.kv, self.prompt = kv, prompt
        self.switch = max(0, prompt - kv.alone)
        self.states: dict[tuple[int, ...], list[Layer]] = {(): [Layer() for _ in range(LAYERS)]}
        self.outputs: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}
        self.still: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}  # keys at position 0

    def output(self, text: tuple[int, ...], layer: int) -> torch.Tensor:
        """What the last token gets (H, D)."""
        self.after(text)
        return self.outputs[text, layer]

    def after(self, text: tuple[int, ...]) -> list[Layer]:
        """What is known after a text."""
        if text not in self.states:
            before = [layer.copy() for layer in self.after(text[:-1])]
            for number, layer in enumerate(before):
                self.outputs[text, number] = self.read(text, number, layer)
            if self.due(len(text)):
                self.change(text, before)
            self.states[text] = before
        return self.states[text]

    def due(self, length: int) -> bool:
        if length <= self.switch:
            return length % self.kv.every == 0 or length == self.switch
        beyond = length - self.kv.initial - self.kv.local
        return beyond > 0 and beyond % self.kv.block == 0

    def row(self, text: tuple[int, ...], place: int, layer: int) -> tuple[torch.Tensor, ...]:
        return rows_of(text[: place + 1], layer)

    def key(self, text: tuple[int, ...], place: int, layer: int) -> torch.Tensor:
        """Of each head, at position 0 (KV, D)."""
        name = (text[: place + 1], layer)
        if name not in self.still:
            keys = rows_of(*name)[1]
            self.still[name] = torch.stack([at(key, -place) for key in keys])
        return self.still[name]

    def read(self, text: tuple[int, ...], number: int, layer: Layer) -> torch.Tensor:
        place = len(text) - 1
        layer.near.append(place)
        layer.got[place] = [0.0] * GROUPS
        q = self.row(text, place, number)[0]
        far = torch.stack([at(one, self.kv.local - 1 - place) for one in q])
        blocks: list[int] = []
        if place < self.switch:
            layer.span.append(far)
            blocks = layer.chosen
        elif layer.blocks:
            blocks = self.ranked(number, layer, far)[: self.count(number, layer)]
            self.chose(number, layer, far)
        distant = [*layer.initial, *(p for one in blocks for p in layer.blocks[one].places)]
        assert not {*distant} & {*layer.near}
        out = []
        for head in range(HEADS):
            group = head // TIMES
            keys = [self.row(text, other, number)[1][group] for other in layer.near]
            scores = [torch.stack(keys) @ q[head] * SCALE]
            if distant:
                keys = [self.key(text, other, number)[group] for other in distant]
                scores.append(torch.stack(keys) @ far[head] * SCALE)
            everything = [*layer.near, *distant]
            values = [self.row(text, other, number)[2][group] for other in everything]
            weights = torch.cat(scores).softmax(0)
            out.append(weights @ torch.stack(values))
            for other, weight in zip(layer.near, weights.tolist(), strict=False):
                layer.got[other][group] += weight / TIMES
        return torch.stack(out)

    def change(self, text: tuple[int, ...], layers: list[Layer]) -> None:
        kv, length = self.kv, len(text)
        for number, layer in enumerate(layers):
            left = 0 if layer.initial or not kv.initial else kv.initial
            if len(layer.near) - left - kv.local >= kv.block and left:
                layer.initial, layer.near = layer.near[:left], layer.near[left:]
            if layer.initial or not kv.initial:
                while len(layer.near) - kv.local >= kv.block:
                    places, layer.near = layer.near[: kv.block], layer.near[kv.block :]
                    layer.blocks.append(self.found(text, number, layer, places))
            probe = self.probe(layer) if layer.span else None
            layer.chosen = []
            if layer.blocks and length < self.switch:
                layer.chosen = self.ranked(number, layer, probe)[: kv.blocks]
            layer.span = []

    def found(self, text: tuple[int, ...], number: int, layer: Layer, places: list[int]) -> Block:
        key = []
        for group in range(GROUPS):
            best = sorted(places, key=lambda place: -layer.got[place][group])
            keys = [
                self.key(text, place, number)[group] for place in best[: self.kv.representatives]
            ]
            key.append(torch.stack(keys).mean(0))
        return Block(places, key)

    def ranked(self, number: int, layer: Layer, q: Any) -> list[int]:
        """The blocks, the best for these queries (H, D) first."""
        scores = [self.score(q, block) for block in layer.blocks]
        return sorted(range(len(scores)), key=lambda one: -scores[one])

    # --- what methods differ in

    def probe(self, layer: Layer) -> torch.Tensor:
        return torch.stack(layer.span).mean(0)

    def score(self, q: torch.Tensor, block: Block) -> float:
        return sum(float(q[head] @ block.key[head // TIMES]) for head in range(HEADS))

    def count(self, number: int, layer: Layer) -> int:
        return int(self.kv.blocks)

    def chose(self, number: int, layer: Layer, q: torch.Tensor) -> None:
        """A token has chosen by itself."""


def differs(
    policy: Any,
    twin: Twin,
    whole: Sequence[int],
    depth: int = 0,
    wrong: bool = False,
    chunk: int = 1000,
) -> float:
    """How far what all nodes get is from what the twin says."""
    most = 0.0
    for text, layer, got in drive(policy, twin.prompt, whole, depth, wrong, chunk):
        most = max(most, float((got - twin.output(text, layer)).abs().max()))
    return most


def made(kind: Any, kv: Any, context: int = 1 << 30) -> Any:
    """A policy without a model."""
    return kind(kv=kv, turn=turn, context=context)


SMALL = Infllm(initial=2, local=7, block=3, blocks=2, representatives=2, every=5, alone=4)
