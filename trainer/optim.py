"""AdamW, the learning rate as a function of the step, and the norm of the whole model's gradient."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from trainer.config import OptimConfig, ScheduleConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters, its moments made at once, so that they can be saved and loaded before step 1."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{name: torch.zeros_like(parameter, dtype=getattr(torch, config.moments)) for name in MOMENTS},
        }
    return optimizer


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Tells AdamW how many steps its moments have seen, for the correction of their bias."""
    for state in optimizer.state.values():
        state["step"].fill_(step)


def learning_rate(step: int, num_steps: int, lr: float, config: ScheduleConfig) -> float:
    """Learning rate of `step`, which counts from 1. The last step gets the lowest, but never nothing: it is a step as well."""
    warmup = config.warmup_steps if config.warmup_ratio is None else math.ceil(config.warmup_ratio * num_steps)
    if step <= warmup:
        return lr * step / warmup
    if config.name == "wsd":
        decay = min(max(1, round(config.decay_fraction * num_steps)), num_steps - warmup)
        left = min(1.0, (num_steps - step + 1) / (decay + 1))
    else:
        left = (num_steps - step + 1) / (num_steps - warmup + 1)
    share = {"constant": 1.0, "cosine": 0.5 * (1 - math.cos(math.pi * left))}.get(config.name, left)
    return lr * (config.min_ratio + (1 - config.min_ratio) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def guarded_step(optimizer: torch.optim.AdamW, norm: torch.Tensor, clip_norm: float | None) -> None:
    """One step, its gradient scaled down from `norm` to `clip_norm` as it is read: a pass of its own over it would cost more.

    The device itself leaves the step out where the norm is no number: nobody has to wait to see.
    """
    # What GradScaler gives fused AdamW, which divides the gradients by the scale.
    optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
    optimizer.grad_scale = None if clip_norm is None else (norm / clip_norm).clamp(min=1).float()  # type: ignore[attr-defined]
    if all(state["exp_avg"].dtype == parameter.dtype for parameter, state in optimizer.state.items()):
        optimizer.step()
    else:
        _step_one_by_one(optimizer)


@torch.no_grad()
def _step_one_by_one(optimizer: torch.optim.AdamW) -> None:
    """A step with moments of another type than the parameters', which torch 2.11 and CPUs do not know: one parameter's at a time
    are made as wide as it is."""
    for group in optimizer.param_groups:
        for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
            state = optimizer.state[parameter]
            wide = [state[name].to(parameter.dtype) for name in MOMENTS]
            adamw(
                [parameter],
                [parameter.grad],
                [wide[0]],
                [wide[1]],
                [],
                [state["step"]],
                fused=True,
                grad_scale=optimizer.grad_scale,  # type: ignore[attr-defined]
                found_inf=optimizer.found_inf,  # type: ignore[attr-defined]
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for name, moment in zip(MOMENTS, wide, strict=True):
                state[name].copy_(moment)


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """L2 norm of all gradients, over all shards of all ranks."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    # A DTensor norm is a promise of a sum: read as it is, it would be this rank's part only.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
