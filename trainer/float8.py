"""The blocks' matrix products in 8-bit floats, which tensor cores from Ada and Hopper on multiply at twice the rate of bfloat16.

Weights, gradients and all else stay as they are: as a product begins, each of its factors is scaled by its largest number
and rounded, weights and activations to e4m3, gradients to e5m2 (Micikevicius et al. 2022, arXiv 2209.05433; torchao's
recipe `tensorwise`, without torchao, which transformers would import into every process). Embeddings, head, norms and small layers
have no part in it.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.config import InputError
from trainer.estimate import without_float8
from trainer.parallel import blocks

LEAST = 1024  # rows and columns of a layer, at least: in a smaller product, rounding takes longer than it saves
MULTIPLE = 16  # of rows and columns, which the kernels need
SMALLEST = 1e-30  # largest number of a tensor that is scaled by it: the scale of a smaller one would be infinite


def use_float8(model: Any, device: torch.device) -> None:
    """Has the blocks' large linear layers multiply in 8-bit floats; InputError where device or model are not made for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise InputError(without_float8(name))
    if not model.is_compiled:
        raise InputError(
            "precision: float8: without a C compiler, which torch.compile needs, it is slow; install one, or write bfloat16"
        )
    convert(model)


def convert(model: Any) -> None:
    """Puts a Float8Linear in the place of the blocks' large linear layers; parameters and their names stay."""
    inside = {id(module) for block in blocks(model) for module in block.modules()}
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and id(module) in inside}
    large = {name: layer for name, layer in layers.items() if all(n >= LEAST and n % MULTIPLE == 0 for n in layer.weight.shape)}
    if not large:
        raise InputError(f"precision: float8: no linear layer of the blocks has {LEAST} rows and columns; write bfloat16")
    for name, layer in large.items():
        model.set_submodule(name, Float8Linear(layer))


class Float8Linear(nn.Linear):
    """A linear layer whose three products, forward and backward, are of 8-bit floats; sums are float32 within, and come out as inputs are."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: Any = _Product.apply(input, self.weight)
        return output if self.bias is None else output + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # [..., in], [out, in]
        ctx.save_for_backward(input, weight)
        rows, columns = Rounded.of(input.flatten(0, -2), torch.float8_e4m3fn), Rounded.of(weight, torch.float8_e4m3fn)
        # Sums of fewer bits, which are faster, do in the forward pass.
        return product(rows, columns.transposed, input.dtype, True).unflatten(0, input.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        rounded = Rounded.of(gradient.flatten(0, -2), torch.float8_e5m2)
        of_input = product(rounded, Rounded.of(weight, torch.float8_e4m3fn), input.dtype, False).unflatten(0, input.shape[:-1])
        return of_input, product(rounded.transposed, Rounded.of(input.flatten(0, -2), torch.float8_e4m3fn), weight.dtype, False)


class Rounded(NamedTuple):
    """A matrix in 8-bit floats, to be multiplied by the float32 `scale`."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor, dtype: torch.dtype) -> "Rounded":
        largest = matrix.abs().amax().float()
        # What is no number stays so. Without min and max, beside which Triton 3.8 stores 8-bit floats wrongly (triton#11111).
        factor = torch.finfo(dtype).max / torch.where(largest > SMALLEST, largest, SMALLEST)
        return cls((matrix.float() * factor).to(dtype), factor.reciprocal())

    @property
    def transposed(self) -> "Rounded":
        return Rounded(self.numbers.t(), self.scale)


def product(a: Rounded, b: Rounded, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """`a` [n, k] times `b` [k, m]. The kernels want `a` row by row in memory and `b` column by column."""
    left, right = a.numbers.contiguous(), b.numbers.t().contiguous().t()
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return multiply(left, right, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=fast)
