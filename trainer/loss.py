"""The loss of a micro-batch's supervised tokens, without ever holding all their logits."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils._triton import has_triton

from trainer.estimate import HEAD_MULTIPLE, head_chunk

MULTIPLE = HEAD_MULTIPLE  # supervised tokens of a micro-batch are filled up to a multiple of it
CPU_CHUNK = 1024  # tokens whose logits exist at once on a CPU


@dataclass(frozen=True)
class Targets:
    """The supervised tokens of a micro-batch: int64 `index` [n] in its tokens laid end to end, int64 `labels` [n] and
    float32 `weights` [n]. Never none: what fills it up weighs nothing."""

    index: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, labels: torch.Tensor, weights: torch.Tensor) -> "Targets":
        """Made on the CPU of `labels` and `weights` [B, L], so that no GPU is asked how many there are."""
        index = weights.flatten().nonzero().flatten()
        labels, weights = labels.flatten()[index], weights.flatten()[index]
        fill = -len(index) % MULTIPLE or (0 if len(index) else MULTIPLE)
        return cls(*(pad(x, (0, fill)) for x in (index, labels, weights)))


def weighted_loss(model: Any, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Sum of weight x cross entropy, in float32, of the model's last hidden states [B, L, d]."""
    head, scale = model.get_output_embeddings(), LogitScale.of(model.config.get_text_config())
    hidden = hidden.flatten(0, 1).index_select(0, targets.index)
    size = chunk_size(len(hidden), len(head.weight), hidden.device)
    arguments = (hidden, head.weight, head.bias, targets.labels, targets.weights, scale, size, torch.is_grad_enabled())
    return _HeadLoss.apply(*arguments)  # type: ignore[return-value]


def scores(model: Any, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
    """float64 [2]: sum of the supervised tokens' cross entropies, unweighted, and how many of them are the likeliest."""
    head, scale = model.get_output_embeddings(), LogitScale.of(model.config.get_text_config())
    hidden = hidden.flatten(0, 1).index_select(0, targets.index)
    size = chunk_size(len(hidden), len(head.weight), hidden.device)
    total = torch.zeros(2, dtype=torch.float64, device=hidden.device)
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        logits = scale.apply(linear(hidden[part], head.weight, head.bias)).float()
        counted = targets.weights[part] != 0
        total[0] += (cross_entropy(logits, targets.labels[part], reduction="none") * counted).sum()
        total[1] += ((logits.argmax(-1) == targets.labels[part]) & counted).sum()
    return total


def chunk_size(count: int, vocabulary: int, device: torch.device) -> int:
    """Tokens a chunk: of `count` tokens equal parts, as few as memory allows."""
    largest = CPU_CHUNK
    if device.type == "cuda":
        largest = head_chunk(vocabulary, torch.cuda.get_device_properties(device).total_memory)
    chunks = -(-count // largest)
    return -(-count // (chunks * MULTIPLE)) * MULTIPLE


class LogitScale(NamedTuple):
    """What some families do to the head's output: cap * tanh(factor * output / cap)."""

    factor: float
    cap: float | None

    @classmethod
    def of(cls, shape: Any) -> "LogitScale":
        # Cohere multiplies, Granite divides, Gemma 2 and 3 cap.
        factor = (getattr(shape, "logit_scale", None) or 1.0) / (getattr(shape, "logits_scaling", None) or 1.0)
        return cls(factor, getattr(shape, "final_logit_softcapping", None))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


def chunk_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, scale: LogitScale, learn: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of weight x cross entropy of `logits` [n, V], before their scale, and with `learn` its gradient for them."""
    if logits.is_cuda and has_triton():
        from trainer.cross_entropy import cross_entropy as fused

        return fused(logits, labels, weights, scale.factor, scale.cap, learn)
    with torch.set_grad_enabled(learn):
        logits.requires_grad_(learn)
        loss = (cross_entropy(scale.apply(logits).float(), labels, reduction="none") * weights).sum()
    return loss.detach(), torch.autograd.grad(loss, logits)[0] if learn else logits


class _HeadLoss(torch.autograd.Function):
    """The head and the loss in one: each chunk's gradients are made while its logits are there, in the forward pass.

    As in Liger's fused linear cross entropy (Hsu et al. 2024, arXiv 2410.10989), but in chunks large enough for the
    matrix kernels, and with the head's gradient summed in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [n, d]
        weight: torch.Tensor,  # [V, d]
        bias: torch.Tensor | None,  # [V]
        labels: torch.Tensor,  # [n]
        weights: torch.Tensor,  # [n]
        scale: LogitScale,
        size: int,
        learn: bool,
    ) -> torch.Tensor:
        of_hidden, of_weight, of_bias = (learn and needed for needed in ctx.needs_input_grad[:3])
        total = torch.zeros((), device=hidden.device)
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        d_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if of_bias else None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = linear(hidden[part], weight, bias)
            loss, d_logits = chunk_loss(logits, labels[part], weights[part], scale, learn)
            del logits
            total += loss
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                _add_product(d_weight, d_logits, hidden[part])
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=torch.float32)
            del d_logits  # before the next chunk's logits
        ctx.gradients, ctx.dtype = (d_hidden, d_weight, d_bias), weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        made, ctx.gradients = ctx.gradients, None
        scaled = [None if x is None else torch.mul(x, grad, out=torch.empty_like(x, dtype=ctx.dtype)) for x in made]
        return *scaled, None, None, None, None, None


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a^T b, in float32: `total` [V, d], `a` [n, V], `b` [n, d]."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a.T, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.T.float(), b.float())
