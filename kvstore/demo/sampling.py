"""Sampling: one token per sequence from its logits, whatever the other sequences of the step are."""

import numpy as np
import numpy.typing as npt
import torch


def draws(seed: int, count: int, number: int = 0) -> npt.NDArray[np.float64]:
    """The uniform numbers in [0, 1) that sample `number` of a request uses, one per token.

    The one for a position depends on nothing but the request's seed, the sample and the position, so that tokens do
    not depend on when a sequence runs, beside whom, or how often it was preempted.
    """
    # A spawn key, since of [seed, number] alone 2**32 + 5 would be the same as [5, 1].
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,) if number else ())).random(count)


def sample(
    logits: torch.Tensor, temperatures: npt.NDArray[np.float64], uniforms: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Greedy where the temperature is 0; elsewhere the token at which the cumulative probability passes the uniform.

    Args:
        logits: [n, vocab_size] of any float dtype.
        temperatures: [n], each >= 0.
        uniforms: [n] in [0, 1); read where the temperature is above 0.

    Returns: int64 [n].

    Raises: ValueError for a row with NaN, or whose largest logit is infinite.
    """
    tokens = logits.argmax(-1)
    highest = logits.gather(-1, tokens[:, None])  # NaN where the row has one: argmax takes it for the largest
    finite = torch.isfinite(highest).squeeze(-1).cpu()
    if not finite.all():
        row = int(finite.long().argmin())
        raise ValueError(f"logits: expected rows with a finite largest number, got {highest[row].item()} in row {row}")
    warm = np.flatnonzero(temperatures)
    if warm.size:
        index = torch.from_numpy(warm).to(logits.device)
        heat = torch.from_numpy(temperatures[warm]).to(logits.device)[:, None]
        # Below the largest logit everything is <= 0, which no temperature, however small, takes to infinity - infinity.
        below = logits[index].double() - highest[index].double()
        # A token that is ruled out stays so at an infinite temperature.
        cumulative = torch.softmax(torch.where(below.isneginf(), below, below / heat), -1).cumsum(-1)
        drawn = torch.from_numpy(uniforms[warm]).to(logits.device)[:, None] * cumulative[:, -1:]
        found = torch.searchsorted(cumulative, drawn, right=True).squeeze(-1)
        tokens[index] = found.clamp_(max=logits.shape[-1] - 1)
    return tokens.cpu().numpy()
