"""cuDNN's attention for documents laid end to end, through NVIDIA's package cudnn (nvidia-cudnn-frontend on PyPI).

torch 2.11 to 2.13 reach the same kernels only for whole sequences. Graphs are built once for a shape; the documents'
ends are data, not shape.
"""

import functools
from typing import Any, NamedTuple

import cudnn  # pyright: ignore[reportMissingImports]
import torch

REAL = cudnn.data_type.FLOAT


class Shape(NamedTuple):
    documents: int
    tokens: int
    longest: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each document: the output [T, H, D] and the log-sum-exp of the scores, float32 [T * H]."""
    out, lse = query.new_empty(query.shape), query.new_empty(query.shape[0] * query.shape[1], dtype=torch.float32)
    shape = _shape(query, key, bounds, longest, scale)
    _execute(_forward_graph(shape), shape, bounds, q=query, k=key, v=value, o=out, lse=lse)
    return out, lse


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    shape = _shape(query, key, bounds, longest, scale)
    tensors = {"q": query, "k": key, "v": value, "o": out, "do": grad, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    _execute(_backward_graph(shape), shape, bounds, **tensors)
    return dq, dk, dv


def _shape(query: torch.Tensor, key: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float) -> Shape:
    tokens, heads, head_dim = query.shape
    return Shape(len(bounds) - 1, tokens, longest, heads, key.shape[1], head_dim, scale, query.dtype, query.device)


class _Graph:
    """A cuDNN graph under construction, its tensors by name."""

    def __init__(self, shape: Shape):
        self.kind = cudnn.data_type.BFLOAT16 if shape.dtype == torch.bfloat16 else cudnn.data_type.HALF
        types = {"io_data_type": self.kind, "intermediate_data_type": REAL, "compute_data_type": REAL}
        self.graph = cudnn.pygraph(**types, handle=_handle(shape.device))
        self.shape = shape
        self.named: dict[str, Any] = {}
        for name in ("q_at", "k_at", "lse_at"):
            self._add(name, [shape.documents + 1, 1, 1, 1], [1, 1, 1, 1], cudnn.data_type.INT64)
        self._add("lengths", [shape.documents, 1, 1, 1], [1, 1, 1, 1], cudnn.data_type.INT32)
        self.options = {
            "attn_scale": shape.scale,
            "use_padding_mask": True,
            "seq_len_q": self.named["lengths"],
            "seq_len_kv": self.named["lengths"],
            "use_causal_mask": True,
        }

    def _add(self, name: str, dim: list[int], stride: list[int], kind: Any) -> Any:
        self.named[name] = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=kind)
        return self.named[name]

    def _layout(self, name: str) -> tuple[list[int], list[int], str]:
        """Dimensions, strides and the name of the offsets of tokens [T, H, D] seen as [documents, H, longest, D]."""
        s = self.shape
        if name == "lse":
            return [s.documents, s.heads, s.longest, 1], [s.longest * s.heads, 1, s.heads, 1], "lse_at"
        heads, at = (s.kv_heads, "k_at") if name in ("k", "v", "dk", "dv") else (s.heads, "q_at")
        width = heads * s.head_dim
        return [s.documents, heads, s.longest, s.head_dim], [s.longest * width, s.head_dim, width, 1], at

    def inputs(self, *names: str) -> dict[str, Any]:
        for name in names:
            dim, stride, at = self._layout(name)
            self._add(name, dim, stride, REAL if name == "lse" else self.kind).set_ragged_offset(self.named[at])
        return {name: self.named[name] for name in names}

    def outputs(self, **tensors: Any) -> None:
        for name, tensor in tensors.items():
            dim, stride, at = self._layout(name)
            tensor.set_output(True).set_dim(dim).set_stride(stride).set_ragged_offset(self.named[at])
            if name == "lse":
                tensor.set_data_type(REAL)
            self.named[name] = tensor

    def built(self) -> "_Graph":
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return self


@functools.cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.cache
def _forward_graph(shape: Shape) -> _Graph:
    made = _Graph(shape)
    out, lse = made.graph.sdpa(name="forward", is_inference=False, **made.inputs("q", "k", "v"), **made.options)
    made.outputs(o=out, lse=lse)
    return made.built()


@functools.cache
def _backward_graph(shape: Shape) -> _Graph:
    made = _Graph(shape)
    tensors = made.inputs("q", "k", "v", "o", "do", "lse")
    tensors["dO"], tensors["stats"] = tensors.pop("do"), tensors.pop("lse")
    sizes = {"max_total_seq_len_q": shape.tokens, "max_total_seq_len_kv": shape.tokens}
    dq, dk, dv = made.graph.sdpa_backward(name="backward", **tensors, **sizes, **made.options)
    made.outputs(dq=dq, dk=dk, dv=dv)
    return made.built()


def _execute(made: _Graph, shape: Shape, bounds: torch.Tensor, **tensors: torch.Tensor) -> None:
    at = bounds.long()
    tensors["q_at"], tensors["k_at"] = at * (shape.heads * shape.head_dim), at * (shape.kv_heads * shape.head_dim)
    tensors["lse_at"], tensors["lengths"] = at * shape.heads, bounds.diff()
    # Some models cut q, k and v out of one tensor; the graph was built for tensors that lie apart. Outputs do already.
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    handle = _handle(shape.device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(shape.device).cuda_stream)
    workspace = torch.empty(max(1, made.graph.get_workspace_size()), dtype=torch.uint8, device=shape.device)
    made.graph.execute({made.named[name]: tensor for name, tensor in tensors.items()}, workspace, handle=handle)
