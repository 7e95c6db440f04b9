"""Low-rank adapters beside frozen linear layers (LoRA: Hu et al. 2021, arXiv 2106.09685), and their files as peft writes them.

peft puts a wrapper around a layer, which gives its weight another name; here the layer is one itself, so that weights are
read, sharded and compiled as they are without adapters.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import dropout, linear

from trainer.config import InputError, LoraConfig, ModelConfig
from trainer.estimate import num_parameters
from trainer.parallel import blocks, full, own_rows


class LoraLinear(nn.Linear):
    """A linear layer and its adapter: W x + b + alpha / r * B A x, of which A [r, in] and B [out, r] are trained."""

    def __init__(self, layer: nn.Linear, config: LoraConfig):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = nn.Parameter(torch.empty(config.r, layer.in_features, device="meta"))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, config.r, device="meta"))
        self.scale, self.dropout = config.alpha / config.r, config.dropout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        inputs = dropout(input, self.dropout, self.training) if self.dropout else input
        return super().forward(input) + self.scale * linear(linear(inputs, self.lora_A), self.lora_B)


def add_adapters(model: Any, config: LoraConfig, dtype: torch.dtype) -> None:
    """Freezes a model on the meta device, in type `dtype`, and gives the layers that `config` names float32 adapters."""
    inside = {id(module) for block in blocks(model) for module in block.modules()}
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and id(module) in inside}
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    targets = known if config.target_modules == ["all-linear"] else config.target_modules
    chosen = {target: [name for name in layers if f".{name}".endswith(f".{target}")] for target in targets}
    if missing := [target for target, names in chosen.items() if not names]:
        there = f"they are named {', '.join(known)}" if known else "the model has none"
        raise InputError(f"lora.target_modules: no linear layer of the blocks is named {missing[0]}; {there}")
    if not chosen:
        raise InputError("lora: the model's blocks have no linear layer for an adapter; leave lora out")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    for name in dict.fromkeys(name for names in chosen.values() for name in names):
        model.set_submodule(name, LoraLinear(layers[name], config))


def adapters(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """A and B of all layers, by the name of the parameter."""
    return {f"{name}.{part}": getattr(layer, part) for name, layer in adapters(model).items() for part in ("lora_A", "lora_B")}


def base_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """All other parameters, by name."""
    adapted = adapter_weights(model)
    return {name: parameter for name, parameter in model.named_parameters() if name not in adapted}


def init_adapters(model: nn.Module, seed: int) -> None:
    """Fills this rank's rows of A with what `seed` gives, as peft draws it, and B with zeros, so that the model is the base model still."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapters(model).values():
        bound = 1 / math.sqrt(layer.in_features)
        drawn = torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
        rows, first = own_rows(layer.lora_A)
        rows.copy_(drawn[first : first + len(rows)])
        own_rows(layer.lora_B)[0].zero_()


def merged(layer: LoraLinear) -> torch.Tensor:
    """The layer's whole weight with its adapter in it, float32. A collective."""
    return full(layer.weight).float() + layer.scale * full(layer.lora_B) @ full(layer.lora_A)


def write_adapters(weights: dict[str, torch.Tensor], config: LoraConfig, base: ModelConfig, folder: Path) -> None:
    """adapter_model.safetensors and adapter_config.json, from `adapter_weights` in full."""
    tensors = {f"base_model.model.{name}.weight": tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    named = {name.split(".")[-2] for name in weights} if config.target_modules == ["all-linear"] else config.target_modules
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "revision": base.revision,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(named),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts, indent=1))


def describe_adapters(model: nn.Module) -> str:
    """What is trained, in a line."""
    names = {name.rpartition(".")[2] for name in adapters(model)}
    count, trained = num_parameters(model)
    return f"lora: {trained:,} of {count:,} parameters are trained ({trained / count:.2%}), beside {', '.join(sorted(names))}"
