"""The cross entropy and its gradient of one chunk of logits, as a Triton kernel that goes over them twice.

It does what `trainer.loss.chunk_loss` does without it, which torch.compile turns into almost twice the time.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8  # the fastest on an H200 at a vocabulary of 151,936


@triton.jit
def _kernel(
    logits, labels, weights, losses, width, stride, factor, cap, capped: tl.constexpr, learn: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label, weight = tl.load(labels + row), tl.load(weights + row)
    # Read before anyone overwrites it: the reductions below are barriers.
    wanted = tl.load(logits + label).to(tl.float32) * factor
    if capped:
        wanted = cap * (2 * tl.sigmoid(2 * wanted / cap) - 1)
    top = tl.full((block,), -1e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < width, other=float("-inf")).to(tl.float32) * factor
        if capped:
            x = tl.where(at < width, cap * (2 * tl.sigmoid(2 * x / cap) - 1), float("-inf"))
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    highest = tl.max(top, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(losses + row, (log_sum - wanted) * weight)
    if learn:
        for start in range(0, width, block):
            at = start + tl.arange(0, block)
            x = tl.load(logits + at, mask=at < width, other=0.0).to(tl.float32) * factor
            slope = factor
            if capped:
                tanh = 2 * tl.sigmoid(2 * x / cap) - 1
                x = cap * tanh
                slope = factor * (1 - tanh * tanh)
            gradient = (tl.exp(x - log_sum) - tl.where(at == label, 1.0, 0.0)) * weight * slope
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < width)


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, factor: float, cap: float | None, learn: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of weight x cross entropy of `logits` [n, V], and with `learn` its gradient, which takes the logits' place."""
    losses = torch.empty(len(logits), device=logits.device)
    arguments = (logits, labels, weights, losses, logits.shape[1], logits.stride(0), factor, cap or 1.0)
    launch: Any = _kernel[(len(logits),)]
    launch(*arguments, capped=cap is not None, learn=learn, block=BLOCK, num_warps=WARPS)
    return losses.sum(), logits
