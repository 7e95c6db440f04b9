"""On a GPU: the fast paths give the loss and gradients of the plain one, compile once and never wait for the device.

python -m pytest tests/gpu/test_fast_paths.py
"""

# ruff: noqa: E402
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "trainer")]
from stores import tokens_of
from tiny import FAMILIES, build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import attention, float8, loss
from trainer.attention import VARLEN, choose_attention
from trainer.config import OptimConfig, TrainerConfig
from trainer.float8 import use_float8
from trainer.model import build_model, load_pretrained, loss_inputs
from trainer.optim import build_optimizer, gradient_norm, guarded_step
from trainer.packing import micro_batches
from trainer.parallel import Wish, World, compile_blocks, compute_type, full, join_world, shard
from trainer.tokens import Tokens
from trainer.train import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTH = 256


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(lambda: Wish.NOTHING) as joined:
        yield joined


def save(folder: Path, family: str, **changes: Any) -> Path:
    """A model of that family, with heads of 64 that the kernels know, and a window shorter than the sequences."""
    config = FAMILIES[family]()
    config.update({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 5000, "dtype": "float32"} | changes)
    if getattr(config, "sliding_window", None):
        config.sliding_window = 48
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def rows(lengths: list[int], seed: int = 0) -> Tokens:
    random = np.random.default_rng(seed)
    total = sum(lengths)
    return tokens_of(random.integers(0, 5000, total, dtype=np.int32), random.random(total) < 0.7, np.array(lengths))


PACKED = [[0, 1, 2], [3, 4], [5], [6, 7]], rows([100, 7, 149, 200, 30, 120, 64, 192])
WHOLE = [[0], [1], [2], [3]], rows([256, 256, 200, 256])


def prepared(folder: Path, world: World, fast: bool, **changes: Any) -> tuple[Any, TrainerConfig, str]:
    values = {
        "name": "t",
        "model": {"path": str(folder), "freeze": changes.pop("freeze", [])},
        "data": {"train": "-", "sequence_length": LENGTH},
        "batch": {"micro_batch": changes.pop("micro_batch", 4)},
    }
    config = TrainerConfig.model_validate(values | ({} if fast else {"attention": "sdpa", "compile": False}) | changes)
    dtype = compute_type(config, world.device)
    kernel = choose_attention(AutoConfig.from_pretrained(folder), config, world.device, dtype)
    model = build_model(folder, config, kernel)
    compile_blocks(model, config, world.device)
    if config.precision == "float8":
        use_float8(model, world.device)
    model = shard(model, world, dtype)
    load_pretrained(model, folder)
    return model, config, kernel


def gradients(model: Any, config: TrainerConfig, world: World, batch: Any) -> dict[str, torch.Tensor]:
    packs, tokens = batch
    total = torch.zeros((), device=world.device)
    model.zero_grad()
    for part in micro_batches(tokens, [np.asarray(pack) for pack in packs], config, 0, 1):
        value = model.supervised_loss(**loss_inputs(model, part, world.device))
        value.backward()
        total += value.detach()
    found = {name: full(p.grad).float() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": total}


def worst(mine: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == plain.keys()
    return max(((mine[name] - plain[name]).norm() / plain[name].norm().clamp_min(1e-9)).item() for name in plain)


@pytest.mark.parametrize("batch", [PACKED, WHOLE], ids=["packed", "whole"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_plain_path(tmp_path: Path, world: World, family: str, batch: Any) -> None:
    folder = save(tmp_path, family)
    fast, config, kernel = prepared(folder, world, fast=True)
    assert kernel == VARLEN
    mine = gradients(fast, config, world, batch)
    exact = gradients(*prepared(folder, world, fast=False, precision="float32")[:2], world, batch)
    rough = gradients(*prepared(folder, world, fast=False)[:2], world, batch)
    assert worst(mine, exact) < max(1.5 * worst(rough, exact), 0.01)
    assert mine["loss"].item() == pytest.approx(exact["loss"].item(), rel=2e-3)


def test_packed_rows_give_the_gradients_of_rows_alone(tmp_path: Path, world: World) -> None:
    model, config, _ = prepared(save(tmp_path, "qwen2"), world, fast=True)
    packs, tokens = PACKED
    together = gradients(model, config, world, PACKED)
    alone = gradients(model, config, world, ([[row] for pack in packs for row in pack], tokens))
    assert worst(together, alone) < 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_parameters_get_no_gradient_and_change_no_other(tmp_path: Path, world: World, tied: bool) -> None:
    folder = save(tmp_path, "qwen2", tie_word_embeddings=tied)
    frozen = ["model.layers.0.*", "model.embed_tokens.weight"] if tied else ["model.layers.1.mlp.*", "lm_head.weight"]
    model, config, _ = prepared(folder, world, fast=True, freeze=frozen)
    mine = gradients(model, config, world, PACKED)
    whole = gradients(*prepared(folder, world, fast=True)[:2], world, PACKED)
    assert len(mine) < len(whole)
    assert worst(mine, {name: whole[name] for name in mine}) < 0.01


def test_a_capped_or_scaled_head_has_the_loss_and_gradient_of_plain_cross_entropy() -> None:
    labels, weights = torch.randint(0, 5000, (128,), device="cuda"), torch.rand(128, device="cuda")
    logits = 8 * torch.randn(128, 5000, device="cuda")
    for scale in (loss.LogitScale(1.0, None), loss.LogitScale(0.5, 30.0), loss.LogitScale(3.0, 10.0)):
        fused, gradient = loss.chunk_loss(logits.clone(), labels, weights, scale, True)
        leaf = logits.clone().requires_grad_()
        plain = (torch.nn.functional.cross_entropy(scale.apply(leaf), labels, reduction="none") * weights).sum()
        assert fused.item() == pytest.approx(plain.item(), rel=1e-5)
        assert torch.allclose(gradient, torch.autograd.grad(plain, leaf)[0], atol=1e-6)


def test_every_kernel_gives_what_the_others_give() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    hopper = torch.cuda.get_device_capability()[0] >= 9
    for heads, kv_heads, head_dim in ((12, 2, 128), (14, 2, 64), (8, 8, 96)):
        assert attention._trouble(heads, kv_heads, head_dim, torch.bfloat16, device) is None
        assert attention._agrees(attention.WHOLE, heads, kv_heads, head_dim, torch.bfloat16, device) == hopper
        packed = attention._agrees(attention.PACKED, heads, kv_heads, head_dim, torch.bfloat16, device)
        assert packed == (hopper and importlib.util.find_spec("cudnn") is not None)


def test_steps_wait_for_nothing_and_compile_once_whatever_the_lengths(tmp_path: Path, world: World) -> None:
    model, config, _ = prepared(save(tmp_path, "mistral", num_hidden_layers=3), world, fast=True, micro_batch=2)
    optimizer = build_optimizer(model, config.optim)
    choose = np.random.default_rng(0)
    batches = [PACKED, WHOLE]
    for _ in range(6):
        lengths = [int(n) for n in choose.integers(2, 60, size=4 * 4)]
        batches.append(([list(range(i, i + 4)) for i in range(0, 16, 4)], rows(lengths)))

    losses = []

    def step(batch: Any) -> None:
        loss, _ = train_step(model, optimizer, batch[1], [np.asarray(pack) for pack in batch[0]], config, world)
        losses.append(world.sum_later(loss))
        world.wish()

    for batch in batches[:3]:
        step(batch)
    torch.cuda.set_sync_debug_mode("error")
    torch._dynamo.config.error_on_recompile = True
    try:
        for batch in batches[2:]:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch._dynamo.config.error_on_recompile = False
    assert len(losses) == len(batches) + 1
    assert all(np.isfinite(loss.values()).all() for loss in losses)


def test_a_gradient_that_is_no_number_leaves_the_weights_as_they_were(tmp_path: Path, world: World) -> None:
    model, config, _ = prepared(save(tmp_path, "qwen2"), world, fast=True)
    optimizer = build_optimizer(model, config.optim)
    gradients(model, config, world, PACKED)
    next(model.parameters()).grad.view(-1)[0] = float("nan")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    guarded_step(optimizer, gradient_norm(model), 1.0)
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))


def test_moments_in_bfloat16_are_stepped_as_on_a_cpu() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1000, 100, device=device) for device in ("cpu", "cuda")]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [build_optimizer(layer, OptimConfig(lr=0.01, weight_decay=0.1, moments="bfloat16")) for layer in layers]
    for _ in range(5):
        for ours, theirs in zip(*(layer.parameters() for layer in layers), strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.cuda()
        for layer, optimizer in zip(layers, optimizers, strict=True):
            guarded_step(optimizer, gradient_norm(layer), 1.0)
    for ours, theirs in zip(*(layer.parameters() for layer in layers), strict=True):
        assert optimizers[1].state[theirs]["exp_avg"].dtype == torch.bfloat16
        # A moment that lies half-way between two numbers of bfloat16 may be rounded to another one.
        apart = (ours - theirs.cpu()).abs()
        assert apart.max() < 1e-3
        assert (apart > 1e-5).float().mean() < 0.01


def test_float8_gives_nearly_the_loss_and_gradients_of_bfloat16(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8, "LEAST", 64)
    folder = save(tmp_path, "qwen2")
    plain = gradients(*prepared(folder, world, fast=True)[:2], world, PACKED)
    mine = gradients(*prepared(folder, world, fast=True, precision="float8")[:2], world, PACKED)
    assert mine["loss"].item() == pytest.approx(plain["loss"].item(), rel=0.01)
    assert 0.01 < worst(mine, plain) < 0.3
