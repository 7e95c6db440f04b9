"""Products in 8-bit floats: which layers have them, how near they are, and where they are refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from pydantic import ValidationError
from tiny import QWEN_1P5B, settings
from torch.utils._python_dispatch import TorchDispatchMode
from training import float8_gradients
from transformers import Qwen2Config

from trainer.config import InputError, RunFile, TrainerConfig
from trainer.driver import prepare
from trainer.estimate import GIB, GPUS, Choice, Machine, choose, step_times
from trainer.float8 import Float8Linear, Rounded, convert, use_float8
from trainer.model import build_model
from trainer.plan import model_shape, plan
from trainer.storage import open_storage


class Products(TorchDispatchMode):
    """Notes the factors of each product in 8-bit floats: type and strides of both, and whether its sums are the fast ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_mm.default:
            left, right = args[:2]
            fast = args[-1] is True  # it is left out where it is its default
            self.seen.append((left.dtype, left.stride(), right.dtype, right.stride(), fast))
        return func(*args, **(kwargs or {}))


def layer_pair(bias: bool = True) -> tuple[torch.nn.Linear, Float8Linear]:
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 128, bias=bias, dtype=torch.bfloat16)
    return plain, Float8Linear(copy.deepcopy(plain))


def output_and_gradients(layer: torch.nn.Linear, inputs: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    inputs = inputs.clone().requires_grad_()
    output = layer(inputs)
    output.float().square().sum().backward()
    return [
        tensor.detach().float() for tensor in (output, inputs.grad, *(p.grad for p in layer.parameters())) if tensor is not None
    ]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_has_nearly_the_loss_and_gradients_of_bfloat16_at_any_number_of_processes(tmp_path: Path, size: int) -> None:
    values = settings(tmp_path, batch={"sequences": 4, "micro_batch": 2})
    mine, plain = (run_processes(size, float8_gradients, values, layers)[0] for layers in (True, False))
    assert mine["loss"] == pytest.approx(plain["loss"], rel=0.01)
    assert mine["gradients"].keys() == plain["gradients"].keys()
    distances = {name: apart(gradient, plain["gradients"][name]) for name, gradient in mine["gradients"].items()}
    assert 0.01 < max(distances.values()) < 0.3


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_nearly_the_plain_one_and_the_same_compiled(bias: bool) -> None:
    plain, mine = layer_pair(bias)
    inputs = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    found, expected = output_and_gradients(mine, inputs), output_and_gradients(plain, inputs)
    assert all(0 < apart(a, b) < 0.06 for a, b in zip(found, expected, strict=True))
    mine.forward = torch.compile(mine.forward, fullgraph=True, dynamic=False)
    compiled = output_and_gradients(mine, inputs)
    assert all(apart(a, b) < 0.01 for a, b in zip(compiled, found, strict=True))


def test_the_kernels_get_the_layout_and_types_that_they_want() -> None:
    _, layer = layer_pair()
    with Products() as products:
        output_and_gradients(layer, torch.randn(2, 16, 64, dtype=torch.bfloat16))
    weight, gradient = torch.float8_e4m3fn, torch.float8_e5m2
    assert products.seen == [
        (weight, (64, 1), weight, (1, 64), True),  # [32, 64] by [64, 128]
        (gradient, (128, 1), weight, (1, 128), False),  # [32, 128] by [128, 64]
        (gradient, (32, 1), weight, (1, 32), False),  # [128, 32] by [32, 64]
    ]


def test_each_number_is_rounded_by_less_than_half_a_bit_of_the_largest_and_what_is_none_stays_so() -> None:
    for scale in (1e-20, 1.0, 1e20):
        matrix = scale * torch.randn(8, 8)
        rounded = Rounded.of(matrix, torch.float8_e4m3fn)
        back = rounded.numbers.float() * rounded.scale
        assert (back - matrix).abs().max() <= matrix.abs().max() / 16
    assert Rounded.of(torch.full((4, 4), 1e-38), torch.float8_e5m2).numbers.float().isfinite().all()
    assert torch.equal(Rounded.of(torch.zeros(4, 4), torch.float8_e5m2).numbers.float(), torch.zeros(4, 4))
    for value in (float("nan"), float("inf")):
        _, layer = layer_pair()
        inputs = torch.randn(2, 16, 64, dtype=torch.bfloat16)
        inputs[0, 0, 0] = value
        assert not output_and_gradients(layer, inputs)[2].isfinite().all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    Qwen2Config(**QWEN_1P5B, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def run_of(folder: Path, hardware: dict[str, Any] | None = None, **changes: Any) -> RunFile:
    trainer = {"name": "x", "model": {"path": str(folder)}, "data": {"train": "-", "sequence_length": 4096}, "precision": "float8"}
    return RunFile.model_validate({"trainer": trainer | {"batch": {"sequences": 16}} | changes, "hardware": hardware or {}})


def test_large_layers_of_blocks_are_changed_and_no_parameter_has_another_name_or_shape(folder: Path) -> None:
    config = run_of(folder).trainer
    model = build_model(folder, config, "sdpa")
    before = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
    convert(model)
    assert {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()} == before
    changed = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
    assert len(changed) == 28 * 5
    assert {name.rpartition(".")[2] for name in changed} == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


# Tokens/s that one H200 gave with the layers of torchao 0.18, whose numbers these are: benchmarks/h200-2026-11-30.md.
def test_the_estimate_of_a_step_in_8_bit_floats_is_what_was_measured(folder: Path) -> None:
    machine = Machine(GPUS["NVIDIA H200"], 139.8 * GIB)
    plain, float8 = (model_shape(run_of(folder, precision=name)) for name in ("bfloat16", "float8"))
    before, after = (16 * 4096 / step_times(shape, Choice(8, 0, "step"), machine, 16, 4096).step for shape in (plain, float8))
    assert after / before == pytest.approx(64_088 / 54_581, rel=0.03)


def refusal(tmp_path: Path, hardware: dict[str, Any]) -> str:
    run = RunFile.model_validate({"trainer": settings(tmp_path, precision="float8"), "hardware": hardware})
    with pytest.raises(InputError) as refused:
        prepare(run, open_storage(run.uri, run.trainer.storage), lambda text: None)
    return str(refused.value)


def test_a_device_that_multiplies_no_8_bit_floats_is_refused_before_workers_start_and_by_them(tmp_path: Path, folder: Path) -> None:
    sentence = "precision: float8: {} does not multiply 8-bit floats, as Ada, Hopper and later GPUs do; write bfloat16"
    assert refusal(tmp_path, {}) == sentence.format("a CPU")
    assert refusal(tmp_path, {"gpus_per_node": 1, "instance_type": "g5.xlarge"}) == sentence.format("NVIDIA A10G")
    with pytest.raises(InputError, match=r"^precision: float8: a CPU does not multiply 8-bit floats"):
        use_float8(build_model(folder, run_of(folder).trainer, "sdpa"), torch.device("cpu"))
    text = plan(run_of(folder), 1, {})
    assert f"g5.xlarge: {sentence.format('its GPU')}" in text
    assert "p5en.48xlarge" in text.partition("cannot be:")[0]
    small = Machine(GPUS["NVIDIA L4"], 22 * GIB)
    with pytest.raises(InputError, match="set lora without precision: float8, which needs about"):
        choose(model_shape(run_of(folder)), small, 8, 4096)


def test_a_model_without_large_layers_is_refused(tmp_path: Path) -> None:
    config = TrainerConfig.model_validate(settings(tmp_path, precision="float8"))
    with pytest.raises(InputError, match=r"no linear layer of the blocks has 1024 rows and columns; write bfloat16"):
        convert(build_model(Path(config.model.path), config, "sdpa"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora": {"r": 4}}, "precision: float8 is for training all weights; with lora, write bfloat16"),
        ({"compile": False}, "without compiled blocks is slower than bfloat16; leave out compile: false"),
        ({"data": {"train": "-", "sequence_length": 1000}}, "needs a data.sequence_length that 16 divides, not 1000"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        run_of(folder, **changes)
