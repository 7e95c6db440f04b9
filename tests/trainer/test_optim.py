"""The learning rate over time, which parameters decay, and what a step costs in FLOPs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from trainer.config import OptimConfig, ScheduleConfig
from trainer.estimate import flops_per_token
from trainer.optim import build_optimizer, guarded_step, learning_rate, set_step


def curve(num_steps: int, **schedule: Any) -> list[float]:
    return [learning_rate(step, num_steps, 1.0, ScheduleConfig(**schedule)) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_rises_linearly_to_the_peak(name: str) -> None:
    assert curve(20, name=name, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(("ratio", "steps"), [(0.0, 0), (0.03, 1), (0.25, 5), (1.0, 20)])
def test_a_warm_up_by_ratio_is_that_share_of_the_steps_rounded_up(ratio: float, steps: int) -> None:
    assert curve(20, warmup_ratio=ratio) == curve(20, warmup_steps=steps)


def test_each_schedule_ends_where_it_should() -> None:
    assert curve(9, name="linear", min_ratio=0.1)[-1] == pytest.approx(0.1 + 0.9 / 10)
    assert curve(99, name="cosine", min_ratio=0.1)[-1] == pytest.approx(0.1, abs=1e-3)
    assert curve(10, name="constant") == [1.0] * 10
    wsd = curve(20, name="wsd", warmup_steps=2, decay_fraction=0.2, min_ratio=0.2)
    assert wsd[2:16] == [1.0] * 14
    assert wsd[15:] == pytest.approx([1.0, 0.84, 0.68, 0.52, 0.36])


def test_cosine_is_half_way_down_at_half_time_and_linear_is_straight() -> None:
    assert curve(99, name="cosine")[49] == pytest.approx(0.5)
    assert curve(99, name="linear", warmup_steps=20)[59] == pytest.approx(0.5)


def test_a_run_of_only_warm_up_or_one_step_has_a_learning_rate() -> None:
    assert curve(3, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])
    assert curve(1, name="constant") == [1.0]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (1, 1), (2, 0), (7, 3), (10, 5)])
def test_every_step_learns_and_none_after_warm_up_learns_more_than_the_one_before(
    name: str, num_steps: int, warmup_steps: int
) -> None:
    rates = curve(num_steps, name=name, warmup_steps=warmup_steps, decay_fraction=1.0)
    assert all(0 < rate <= 1 for rate in rates)
    after = rates[max(0, warmup_steps - 1) :]
    assert after == sorted(after, reverse=True)


def test_norms_and_biases_do_not_decay_and_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {
        id(model[0].weight): 0.1,
        id(model[0].bias): 0.0,
        id(model[1].weight): 0.0,
        id(model[1].bias): 0.0,
        id(model[2].bias): 0.0,
    }


def test_moments_made_ahead_give_the_steps_of_plain_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Linear(5, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    mine = build_optimizer(ours, OptimConfig(lr=0.01, weight_decay=0.1))
    groups: list[Any] = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        data = torch.randn(7, 5)
        for model, optimizer in ((ours, mine), (theirs, plain)):
            optimizer.zero_grad()
            model(data).square().sum().backward()
            optimizer.step()
        set_step(mine, step + 1)
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)
    assert torch.allclose(ours.bias, theirs.bias, atol=1e-6)


def test_moments_in_bfloat16_are_those_of_float32_rounded_once_a_step() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    config = OptimConfig(lr=0.01, weight_decay=0.1, moments="bfloat16")
    optimizer = build_optimizer(layer, config)
    expected = {parameter: parameter.detach().clone() for parameter in layer.parameters()}
    moments = {parameter: [torch.zeros_like(parameter)] * 2 for parameter in layer.parameters()}
    for step in range(1, 6):
        gradients = {parameter: torch.randn_like(parameter) for parameter in layer.parameters()}
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.clone()
            first, second = (moment.float() for moment in moments[parameter])
            gradient = gradient / 2  # the norm is 2 x what it is clipped to
            first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
            if parameter.ndim > 1:
                expected[parameter] *= 1 - 0.01 * 0.1
            expected[parameter] -= 0.01 * first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
            moments[parameter] = [first.bfloat16(), second.bfloat16()]
        guarded_step(optimizer, torch.tensor(2.0), 1.0)
    for parameter in layer.parameters():
        state = optimizer.state[parameter]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        assert state["step"] == 5
        assert torch.allclose(parameter, expected[parameter], atol=1e-6)
        # Where a sum of float32 lies half-way between two neighbours, its order decides on which it is rounded to.
        assert torch.allclose(state["exp_avg"], moments[parameter][0], rtol=1 / 128)
        assert torch.allclose(state["exp_avg_sq"], moments[parameter][1], rtol=1 / 128)


def test_a_gradient_that_is_no_number_leaves_moments_in_bfloat16_and_their_count_as_they_were() -> None:
    layer = nn.Linear(5, 3)
    optimizer = build_optimizer(layer, OptimConfig(moments="bfloat16"))
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    guarded_step(optimizer, torch.tensor(1.0), 1.0)
    before = [tensor.clone() for p, state in optimizer.state.items() for tensor in (p.detach(), *state.values())]
    guarded_step(optimizer, torch.tensor(float("nan")), 1.0)
    after = [tensor for p, state in optimizer.state.items() for tensor in (p.detach(), *state.values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_moment_that_bfloat16_could_not_let_decay_is_refused() -> None:
    assert OptimConfig(beta2=0.999).moments == "float32"
    with pytest.raises(ValidationError, match=r"rounded back to what it was at beta2 0\.999; set it to 0\.99 or less"):
        OptimConfig(beta2=0.999, moments="bfloat16")
    largest = torch.tensor(1.9921875).bfloat16()  # of the numbers below 2, the one whose neighbour is nearest to it
    assert (largest.float() * 0.99).bfloat16() < largest
    assert (largest.float() * 0.999).bfloat16() == largest


def test_flops_of_a_token_of_qwen_1p5b_at_4096_are_those_of_the_formula() -> None:
    shape = SimpleNamespace(parameters=1_543_714_304, layers=28, width=1536)
    assert flops_per_token(shape.parameters, shape.parameters, shape.layers, shape.width, 4096) == pytest.approx(11.38e9, rel=1e-3)
