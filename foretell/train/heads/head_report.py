"""How well a head foretells answers that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.ranks import smooth_table
from foretell.train.draft import group_lengths
from foretell.train.heads.head_data import Known, Teacher, answer_places

RANKS = 10  # candidates of a place that are counted apart


@torch.inference_mode()
def hit_shares(
    head: Head, texts: Sequence[Known], teacher: Teacher, depths: int, size: int
) -> list[float]:
    """Share of places, by depth, where the head's best token is the target's best one and
    was at every depth before, in those of the texts that are greedy; [] where none is.
    """
    texts = [text for text in texts if (text.tokens[text.prompt :] == text.top_tokens).all()]
    if not texts:
        return []
    head.eval()
    right_counts = np.zeros(depths)
    place_count = 0
    tokens = torch.tensor(teacher.output.tokens)
    for group in group_lengths([len(text.tokens) for text in texts], size, 0):
        group_texts = [texts[number] for number in group]
        batch, answers = teacher.texts(group_texts, 0.0, 0)
        target_best = torch.full(batch.ids.shape, -1)
        for row, text in enumerate(group_texts):
            target_best[row, text.prompt - 1 : len(text.tokens) - 1] = torch.from_numpy(
                text.top_tokens.astype(np.int64)
            )
        # Anchors of which all depths are known, so that depths have the same ones.
        row, token_place = answer_places(answers, depths - 1).T
        has_all_depths = answers[row, token_place + 1]
        row, token_place = row[has_all_depths], token_place[has_all_depths]
        so_far = torch.ones(len(row), dtype=torch.bool)
        place_count += len(row)
        with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
            for drafted in head.unroll_depths(batch, depths):
                states = drafted.states[row, token_place].to(teacher.weight.dtype)
                guess = tokens[(states @ teacher.weight.T).argmax(-1).cpu()]
                so_far &= guess == target_best[row, token_place + drafted.depth]
                right_counts[drafted.depth] += float(so_far.sum())
    head.train()
    return [round(float(share), 4) for share in right_counts / max(1, place_count)]


@torch.inference_mode()
def mean_overlaps(
    head: Head, texts: Sequence[Known], teacher: Teacher, depths: int, size: int
) -> list[float]:
    """Mean of sum(min(p, q)), by depth, over the places of all texts: the probability that a token
    drawn from the head's distribution is accepted at temperature 1, given the text's tokens before
    it.
    """
    head.eval()
    overlap_sums, counts = np.zeros(depths), np.zeros(depths)
    for group in group_lengths([len(text.tokens) for text in texts], size, 0):
        batch, answers = teacher.texts([texts[number] for number in group], 0.0, 0)
        with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
            for drafted in head.unroll_depths(batch, depths):
                row, token_place = answer_places(answers, drafted.depth).T
                laws = teacher.true_laws(batch.finals[row, token_place + drafted.depth])
                states = drafted.states[row, token_place].to(teacher.weight.dtype)
                q = (states @ teacher.weight.T).float().softmax(-1)
                overlap_sums[drafted.depth] += float(torch.minimum(laws, q).sum())
                counts[drafted.depth] += len(row)
    head.train()
    return [round(float(share), 4) for share in overlap_sums / np.maximum(1, counts)]


@torch.inference_mode()
def true_ranks(
    head: Head, texts: Sequence[Known], teacher: Teacher, depths: int, size: int
) -> list[np.ndarray]:
    """Ranks (m, depths) int, by place and depth, that the head gives the own tokens of each greedy
    text, given the tokens before; RANKS where such a token is not among the first.
    """
    head.eval()
    greedy = [text for text in texts if (text.tokens[text.prompt :] == text.top_tokens).all()]
    if not greedy:
        return []
    text_ranks: list[np.ndarray] = []
    for group in group_lengths([len(text.tokens) for text in greedy], size, 0):
        batch, answers = teacher.texts([greedy[number] for number in group], 0.0, 0)
        # Places of which all depths are known, so that depths have the same ones.
        row, token_place = answer_places(answers, depths - 1).T
        has_all_depths = answers[row, token_place + 1]
        row, token_place = row[has_all_depths], token_place[has_all_depths]
        ranks = np.full((len(row), depths), RANKS)
        with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
            for drafted in head.unroll_depths(batch, depths):
                names = teacher.names[batch.ids[row, token_place + drafted.depth + 1].cpu()]
                states = drafted.states[row, token_place].to(teacher.weight.dtype)
                logits = states @ teacher.weight.T
                top_tokens = logits.topk(min(RANKS, logits.shape[1]), -1).indices.cpu()
                rank, column = (top_tokens == names[:, None]).nonzero().T
                ranks[rank.numpy(), drafted.depth] = column.numpy()
        text_ranks += [ranks[(row == number).numpy()] for number in range(len(group))]
    head.train()
    return text_ranks


def rank_table(ranks: Sequence[np.ndarray]) -> list[list[float]]:
    """Share of places, by depth and rank, where that rank is the text's token; [] of no place.

    A worse rank is never said to be right more often than a better one.
    """
    if not sum(map(len, ranks)):
        return []
    all_ranks = np.concatenate(list(ranks))
    shares = [
        np.bincount(column, minlength=RANKS + 1)[:RANKS] / len(all_ranks) for column in all_ranks.T
    ]
    return smooth_table([[round(float(share), 4) for share in row] for row in shares])
