"""What the logits and states of the toy models are made of: hashes that look random."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FEATURES = 2  # numbers of a hidden state
RELATIVE = 977  # what a relative's noise adds to the seed
KEPT = 1 << 14  # rows of logits, and other hashes, that are kept
SHORT = 256  # numbers at most of what a hash is kept of


# Of splitmix64.
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix_bits(x: np.ndarray) -> np.ndarray:
    """Hashes numbers by splitmix64, elementwise on uint64."""
    x = (x ^ (x >> SHIFTS[0])) * FACTORS[0]
    x = (x ^ (x >> SHIFTS[1])) * FACTORS[1]
    return x ^ (x >> SHIFTS[2])


def spread_numbers(key: np.uint64 | np.ndarray, seed: int, count: int) -> np.ndarray:
    """`count` numbers from -0.5 to 0.5, which look random and are a function of key and seed.

    Of keys (n, 1) as many rows (n, count).
    """
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
        hashes = mix_bits(mix_bits(np.array(key) + np.uint64(seed) * GOLDEN) + steps)
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5


@lru_cache(maxsize=KEPT)
def kept_spread(key: np.uint64, seed: int, count: int) -> np.ndarray:
    """Numbers (count,) of `spread_numbers` of one key, which nobody may change."""
    numbers = spread_numbers(key, seed, count)
    numbers.flags.writeable = False
    return numbers


def path_key(tokens: np.ndarray, positions: np.ndarray) -> np.uint64:
    """The hash of a set of tokens at their positions (n,), in any order."""
    tokens, positions = np.asarray(tokens, np.float64), np.asarray(positions, np.float64)
    if len(tokens) > SHORT:
        return _path_key(tokens, positions)
    return _kept_path_key(tokens.tobytes(), positions.tobytes())


def _path_key(tokens: np.ndarray, positions: np.ndarray) -> np.uint64:
    with np.errstate(over="ignore"):
        pairs = tokens.astype(np.uint64) * np.uint64(1_000_003) + positions.astype(np.uint64)
        return np.uint64(mix_bits(pairs * GOLDEN + GOLDEN).sum(dtype=np.uint64))


@lru_cache(maxsize=KEPT)
def _kept_path_key(tokens: bytes, positions: bytes) -> np.uint64:
    return _path_key(np.frombuffer(tokens), np.frombuffer(positions))


def fed_key(tokens: np.ndarray, values: np.ndarray, vocab: int) -> np.uint64:
    """The hash of a set of tokens (n,), each with its position and the hash of its feature (n, 2).

    A token below 0 is a mask, which is one more than the vocabulary has.
    """
    if len(tokens) > SHORT:
        return _fed_key(tokens, values, vocab)
    return _kept_fed_key(tokens.tobytes(), values.tobytes(), vocab)


def _fed_key(tokens: np.ndarray, values: np.ndarray, vocab: int) -> np.uint64:
    with np.errstate(over="ignore"):
        tokens = np.where(tokens < 0, vocab, tokens)
        features = mix_bits(values[:, 1].astype(np.uint64))
        pairs = tokens.astype(np.uint64) * np.uint64(1_000_003)
        pair_hashes = mix_bits((pairs + values[:, 0].astype(np.uint64)) * GOLDEN)
        return np.uint64(mix_bits(pair_hashes + features).sum(dtype=np.uint64))


@lru_cache(maxsize=KEPT)
def _kept_fed_key(tokens: bytes, values: bytes, vocab: int) -> np.uint64:
    return _fed_key(np.frombuffer(tokens), np.frombuffer(values).reshape(-1, 2), vocab)


@lru_cache(maxsize=KEPT)
def hidden_state(key: np.uint64, seed: int) -> np.ndarray:
    """State (2,) of numbers from -1 to 1 that are a function of key and seed. They fit into
    float32.
    """
    return np.round(spread_numbers(key, seed, FEATURES) * 2**21) / 2**20


@lru_cache(maxsize=KEPT)
def logits_of(
    token_bytes: bytes,
    position_bytes: bytes,
    vocab: int,
    seed: int,
    sharpness: float,
    copy: float,
    noise: float,
) -> np.ndarray:
    """Logits (V,) of a Toy's node that sees these tokens at these positions, each float64.

    They are kept: enumeration of a law asks for the same few again and again.
    """
    tokens, positions = np.frombuffer(token_bytes), np.frombuffer(position_bytes)
    key = path_key(tokens, positions)
    logits = sharpness * spread_numbers(key, seed, vocab)
    if copy:
        text = tokens[np.argsort(positions)]
        for earlier_index in np.flatnonzero(text[:-1] == text[-1]):
            logits[int(text[earlier_index + 1])] += copy
    if noise:
        logits = logits + noise * sharpness * spread_numbers(key, seed + RELATIVE, vocab)
    return logits


def whole_numbers(keys: np.ndarray) -> np.ndarray:
    """Hashes as whole numbers from 1 to 2**52, which float64 holds exactly."""
    return (keys >> np.uint64(12)).astype(np.float64) + 1


def feature_hash(features: np.ndarray) -> np.ndarray:
    """Hash of each row (n, 2) float64: a whole number from 1 to 2**52 as float64."""
    bits = np.ascontiguousarray(features + 0.0).view(np.uint64)  # + 0.0: -0.0 is 0.0
    with np.errstate(over="ignore"):
        hashes = mix_bits(mix_bits(bits[:, 0] + GOLDEN) + bits[:, 1])
    return (hashes >> np.uint64(12)).astype(np.float64) + 1
