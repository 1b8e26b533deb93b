"""How well a head foretells answers that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.ranks import smoothed
from foretell.train.draft import blocks
from foretell.train.heads.head_data import Known, Teacher, places

RANKS = 10  # candidates of a place that are counted apart


@torch.inference_mode()
def hits(
    head: Head, texts: Sequence[Known], teacher: Teacher, depths: int, size: int
) -> list[float]:
    """At each depth the share of places where the head's best token is the target's best one and
    was at every depth before, in those of the texts that are greedy; [] where none is.
    """
    texts = [text for text in texts if (text.tokens[text.prompt :] == text.best).all()]
    if not texts:
        return []
    head.eval()
    right = np.zeros(depths)
    count = 0
    tokens = torch.tensor(teacher.output.tokens)
    for group in blocks([len(text.tokens) for text in texts], size, 0):
        chosen = [texts[number] for number in group]
        batch, answers = teacher.texts(chosen, 0.0, 0)
        best = torch.full(batch.ids.shape, -1)
        for row, text in enumerate(chosen):
            best[row, text.prompt - 1 : len(text.tokens) - 1] = torch.from_numpy(
                text.best.astype(np.int64)
            )
        # Anchors of which all depths are known, so that depths have the same ones.
        row, place = places(answers, depths - 1).T
        kept = answers[row, place + 1]
        row, place = row[kept], place[kept]
        so_far = torch.ones(len(row), dtype=torch.bool)
        count += len(row)
        with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
            for drafted in head.unroll(batch, depths):
                states = drafted.states[row, place].to(teacher.weight.dtype)
                guess = tokens[(states @ teacher.weight.T).argmax(-1).cpu()]
                so_far &= guess == best[row, place + drafted.depth]
                right[drafted.depth] += float(so_far.sum())
    head.train()
    return [round(float(share), 4) for share in right / max(1, count)]


@torch.inference_mode()
def overlaps(
    head: Head, texts: Sequence[Known], teacher: Teacher, depths: int, size: int
) -> list[float]:
    """At each depth the mean of sum(min(p, q)) over the places of all texts: the chance that a
    token drawn from the head's law is accepted at temperature 1, given the text's tokens before it.
    """
    head.eval()
    shared, counts = np.zeros(depths), np.zeros(depths)
    for group in blocks([len(text.tokens) for text in texts], size, 0):
        batch, answers = teacher.texts([texts[number] for number in group], 0.0, 0)
        with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
            for drafted in head.unroll(batch, depths):
                row, place = places(answers, drafted.depth).T
                laws = teacher.true_laws(batch.finals[row, place + drafted.depth])
                states = drafted.states[row, place].to(teacher.weight.dtype)
                q = (states @ teacher.weight.T).float().softmax(-1)
                shared[drafted.depth] += float(torch.minimum(laws, q).sum())
                counts[drafted.depth] += len(row)
    head.train()
    return [round(float(share), 4) for share in shared / np.maximum(1, counts)]


@torch.inference_mode()
def true_ranks(
    head: Head, texts: Sequence[Known], teacher: Teacher, depths: int, size: int
) -> list[np.ndarray]:
    """Of each greedy text, by place and depth, the rank that the head gives the text's own token,
    given the tokens before it: (m, depths) int, RANKS where it is not among the first.
    """
    head.eval()
    greedy = [text for text in texts if (text.tokens[text.prompt :] == text.best).all()]
    if not greedy:
        return []
    found: list[np.ndarray] = []
    for group in blocks([len(text.tokens) for text in greedy], size, 0):
        batch, answers = teacher.texts([greedy[number] for number in group], 0.0, 0)
        # Places of which all depths are known, so that depths have the same ones.
        row, place = places(answers, depths - 1).T
        kept = answers[row, place + 1]
        row, place = row[kept], place[kept]
        ranks = np.full((len(row), depths), RANKS)
        with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
            for drafted in head.unroll(batch, depths):
                names = teacher.names[batch.ids[row, place + drafted.depth + 1].cpu()]
                states = drafted.states[row, place].to(teacher.weight.dtype)
                logits = states @ teacher.weight.T
                best = logits.topk(min(RANKS, logits.shape[1]), -1).indices.cpu()
                rank, column = (best == names[:, None]).nonzero().T
                ranks[rank.numpy(), drafted.depth] = column.numpy()
        found += [ranks[(row == number).numpy()] for number in range(len(group))]
    head.train()
    return found


def rank_table(ranks: Sequence[np.ndarray]) -> list[list[float]]:
    """By depth and rank the share of places where that rank is the text's token; [] of no place.

    A worse rank is never said to be right more often than a better one.
    """
    if not sum(map(len, ranks)):
        return []
    joined = np.concatenate(list(ranks))
    shares = [np.bincount(column, minlength=RANKS + 1)[:RANKS] / len(joined) for column in joined.T]
    return smoothed([[round(float(share), 4) for share in row] for row in shares])
