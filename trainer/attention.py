"""Attention of packed rows on a GPU: documents are told apart by where they end, so no mask is built and no shape changes.

It owns the choice of the attention kernel, the ends of a micro-batch's documents, and one operator, registered with
transformers under the name VARLEN, that holds for torch.compile as it is. On a CPU rows are kept apart by the dense
mask that transformers makes of the positions.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface

from trainer.config import InputError, TrainerConfig

VARLEN = "ray_finetune_varlen"
BUCKET = 64  # the number of documents is rounded up to a multiple of it: kernels are launched for so many

aten: Any = torch.ops.aten


def choose_attention(base: Any, config: TrainerConfig, device: torch.device, dtype: torch.dtype) -> str:
    """transformers' name of the attention kernel for a model of the configuration `base`, computed in `dtype`."""
    if config.attention != "auto":
        return config.attention
    shape = base.get_text_config()
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(base)]
    if getattr(shape, "attn_logit_softcapping", None) or not family._supports_sdpa:
        return "eager"  # capped scores and attention sinks are in no other kernel
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    fits = family._supports_attention_backend and getattr(shape, "v_head_dim", head_dim) == head_dim
    if device.type != "cuda" or dtype == torch.float32 or not fits or torch.cuda.get_device_capability(device) < (8, 0):
        return "sdpa"
    heads = shape.num_attention_heads
    if reason := _trouble(heads, getattr(shape, "num_key_value_heads", None) or heads, head_dim, dtype, device):
        print(f"attention: variable-length kernels cannot be used here ({reason}); sdpa with a mask takes their place", flush=True)
        return "sdpa"
    return VARLEN


def _trouble(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FLASH is no good for this shape on this device, found by trying it against plain attention."""
    sample = _sample(heads, kv_heads, head_dim, dtype, device)
    place = torch.arange(2 * SAMPLE, device=device)
    age = place[:, None] - place
    bounds = torch.tensor([0, 50, SAMPLE, 2 * SAMPLE, 2 * SAMPLE], dtype=torch.int32, device=device)
    document = torch.bucketize(place, bounds[1:], right=True)
    for window in (-1, 40):
        mask = (document[:, None] == document) & (age >= 0) & (age <= (window if window >= 0 else 2 * SAMPLE))
        try:
            mine = FLASH.run(sample, bounds, window)
        except (RuntimeError, TypeError, AttributeError) as error:
            return " ".join(str(error).split())[:200]
        if not _close(mine, _masked(sample, mask)):
            return "they do not give what plain attention gives"
    return None


SAMPLE = 192  # tokens of each of two sequences by which kernels are tried


def _sample(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random gradient, query, key and value, the last three cut out of one tensor, as some models do."""
    make = torch.Generator(device).manual_seed(0)
    grad, whole = (
        torch.randn(2 * SAMPLE, count, head_dim, dtype=dtype, device=device, generator=make)
        for count in (heads, heads + 2 * kv_heads)
    )
    return [grad, *whole.split([heads, kv_heads, kv_heads], dim=1)]


def _close(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all((a.float() - b.float()).norm() < 0.02 * b.float().norm() for a, b in zip(mine, theirs, strict=True))


def _masked(sample: list[torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
    """What `Kernel.run` gives, by plain attention in float32."""
    grad, *inputs = (x.float().transpose(0, 1).unsqueeze(0) for x in sample)
    leaves = [x.requires_grad_() for x in inputs]
    out = scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    return [x[0].transpose(0, 1) for x in (out, *torch.autograd.grad(out, leaves, grad))]


def describe_kernels(chosen: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """The attention that `chosen` stands for, in words; tries cuDNN's kernels."""
    if chosen != VARLEN:
        return f"attention by {chosen}"
    found = [
        what
        for kernel, what in ((WHOLE, "whole sequences"), (PACKED, "packed rows"))
        if _agrees(kernel, heads, kv_heads, head_dim, dtype, device)
    ]
    return f"attention by cuDNN for {' and '.join(found)}, else FlashAttention" if found else "attention by FlashAttention"


# ---- documents ----


def document_bounds(position_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Where the documents of a micro-batch laid end to end start and end, int32 [multiple of BUCKET + 1], on the CPU.

    `position_ids` and `weights` are [B, L]. Filled up with empty documents, except where every sequence is one document:
    then there are exactly B of them, by which `varlen` knows that it may use kernels for whole sequences. Tokens after a
    sequence's last weight never reach the loss, so one document and the padding behind it count as one.
    """
    batch, length = position_ids.shape
    starts = position_ids == 0
    if not ((starts.cumsum(1) > 1) & (weights != 0)).any():
        return torch.arange(batch + 1, dtype=torch.int32) * length
    found = starts.flatten().nonzero().flatten().int()
    total = -(-max(len(found), batch + 1) // BUCKET) * BUCKET
    return pad(found, (0, total + 1 - len(found)), value=batch * length)


# ---- the operator ----


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention within each document.

    `query` [T, H, D], `key` and `value` [T, K, D] with K a divisor of H; document i is bounds[i]:bounds[i + 1], none
    longer than `longest`; a token sees itself and `window` tokens before it, or all of them.
    """
    return _varlen(query, key, value, bounds, longest, scale, -1 if window is None else window)[0]


@dataclass(frozen=True)
class Kernel:
    """`forward` gives the output [T, H, D] and the scores' log-sum-exp, float32 [T * H] in the kernel's own order."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def run(self, sample: list[torch.Tensor], bounds: torch.Tensor, window: int) -> list[torch.Tensor]:
        """The output and the gradients of query, key and value for what `_sample` gives."""
        grad, *inputs = sample
        rest = (bounds, SAMPLE, grad.shape[-1] ** -0.5, window)
        out, lse = self.forward(*inputs, *rest)
        return [out, *self.backward(grad, *inputs, out, lse, *rest)]


def _flash_forward(query: Any, key: Any, value: Any, bounds: Any, longest: int, scale: float, window: int) -> Any:
    arguments = (query, key, value, bounds, bounds, longest, longest, 0.0, window < 0, False)
    out, lse, *_ = aten._flash_attention_forward(*arguments, scale=scale, **_window(window))
    return out, lse.flatten()


def _flash_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, bounds: Any, longest: int, scale: float, window: int
) -> Any:
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    lse = lse.view(query.shape[1], -1)
    arguments = (grad, query, key, value, out, lse, bounds, bounds, longest, longest, 0.0, window < 0, seed, unused)
    return aten._flash_attention_backward(*arguments, scale=scale, **_window(window))


def _window(window: int) -> dict[str, int]:
    return {"window_size_left": window, "window_size_right": 0} if window >= 0 else {}


def _whole_forward(query: Any, key: Any, value: Any, bounds: Any, longest: int, scale: float, window: int) -> Any:
    batch = [_as_batch(x, longest) for x in (query, key, value)]
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*batch, None, True, 0.0, True, False, scale=scale)
    return _as_tokens(out), lse.flatten()


def _whole_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, bounds: Any, longest: int, scale: float, window: int
) -> Any:
    batch = [_as_batch(x, longest) for x in (grad, query, key, value, out)]
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of the dropout that there is not
    lse = lse.view(-1, query.shape[1], longest, 1)
    rest = (lse, seed, seed, None, None, None, longest, longest, 0.0, True)
    return tuple(map(_as_tokens, aten._scaled_dot_product_cudnn_attention_backward(*batch, *rest, scale=scale)))


def _as_batch(x: torch.Tensor, longest: int) -> torch.Tensor:
    return x.unflatten(0, (-1, longest)).transpose(1, 2)  # [B, H, L, D]


def _as_tokens(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _packed_forward(*arguments: Any) -> Any:
    from trainer import cudnn_attention

    return cudnn_attention.forward(*arguments[:-1])  # all but the window


def _packed_backward(*arguments: Any) -> Any:
    from trainer import cudnn_attention

    return cudnn_attention.backward(*arguments[:-1])


FLASH = Kernel(_flash_forward, _flash_backward)  # FlashAttention 2, in torch: any lengths and windows
WHOLE = Kernel(_whole_forward, _whole_backward)  # cuDNN's, in torch: twice as fast on Hopper, for whole sequences
PACKED = Kernel(_packed_forward, _packed_backward)  # the same for any lengths, where the package cudnn is installed


def _kernel(query: torch.Tensor, key: torch.Tensor, bounds: torch.Tensor, longest: int, window: int) -> Kernel:
    """The fastest kernel for these documents that does what FLASH does."""
    if window >= 0:
        return FLASH
    kernel = WHOLE if (len(bounds) - 1) * longest == query.shape[0] else PACKED
    return kernel if _agrees(kernel, query.shape[1], key.shape[1], query.shape[2], query.dtype, query.device) else FLASH


@functools.cache
def _agrees(kernel: Kernel, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel of cuDNN runs here and gives what FLASH gives, found by trying."""
    if torch.cuda.get_device_capability(device) < (9, 0) or head_dim > 128:
        return False  # it would not be faster
    sample = _sample(heads, kv_heads, head_dim, dtype, device)
    ends = [SAMPLE, 2 * SAMPLE] if kernel is WHOLE else [50, SAMPLE, 2 * SAMPLE, 2 * SAMPLE]
    bounds = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    try:
        if _close(kernel.run(sample, bounds, -1), FLASH.run(sample, bounds, -1)):
            return True
        reason = "it does not give what FlashAttention gives"
    except Exception as error:  # the package is missing, too old, or knows no kernel for this: FLASH is there
        reason = " ".join(str(error).split())[:200]
    what = "whole sequences" if kernel is WHOLE else "packed rows"
    print(f"attention: cuDNN's kernel for {what} cannot be used here ({reason}); FlashAttention takes its place", flush=True)
    return False


@torch.library.custom_op("ray_finetune::varlen", mutates_args=())
def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernel(query, key, bounds, longest, window).forward(query, key, value, bounds, longest, scale, window)


@_varlen.register_fake
def _(query: Any, key: Any, value: Any, bounds: Any, longest: int, scale: float, window: int) -> Any:
    return query.new_empty(query.shape), query.new_empty(query.shape[0] * query.shape[1], dtype=torch.float32)


@torch.library.custom_op("ray_finetune::varlen_backward", mutates_args=())
def _varlen_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kernel = _kernel(query, key, bounds, longest, window)
    return kernel.backward(grad, query, key, value, out, lse, bounds, longest, scale, window)


@_varlen_backward.register_fake
def _(grad: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, bounds, ctx.longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    arguments = (grad.contiguous(), *ctx.saved_tensors, ctx.longest, ctx.scale, ctx.window)
    return *torch.ops.ray_finetune.varlen_backward(*arguments), None, None, None, None


_varlen.register_autograd(_backward, setup_context=_save)


def _for_transformers(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    document_bounds: torch.Tensor | None = None,
    longest_document: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [B, H, L, D], `key` and `value` [B, K, L, D]; the result [B, L, H, D], as transformers wants it."""
    assert document_bounds is not None, "the model does not pass its keyword arguments on to its attention"
    if softcap is not None or s_aux is not None or not getattr(module, "is_causal", True):
        raise InputError(f"attention: {type(module).__name__} needs more than causal attention in a window; set eager")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # transformers' window counts the token itself, the kernel's does not.
    window = sliding_window - 1 if sliding_window is not None and sliding_window < longest_document else None
    out = varlen(q, k, v, document_bounds, longest_document, scale, window)
    return out.unflatten(0, (query.shape[0], -1)), None


AttentionInterface.register(VARLEN, _for_transformers)
