"""Memory, time and choices by arithmetic, beside what was measured (benchmarks/) and what the blog's sample measured on L4s."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import QWEN_1P5B, QWEN_7B
from transformers import Qwen2Config

from trainer.config import InputError, RunFile
from trainer.estimate import (
    GIB,
    GPUS,
    SOCKET_BYTES,
    Choice,
    Machine,
    Shape,
    choose,
    flops_per_token,
    peak_bytes,
    state_bytes,
    step_times,
)
from trainer.plan import catalogue, machine_of, model_shape, plan

H200 = Machine(GPUS["NVIDIA H200"], 139.8 * GIB)
SAMPLE_EFA, SAMPLE_TCP = 0.5173, 0.2513  # steps/s of aws-samples' training/ray-train, 2 x g6.12xlarge, batch 1, sequence 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    Qwen2Config(**QWEN_1P5B, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def run_of(
    folder: Path, sequences: int = 64, lora: dict[str, int] | None = None, moments: str = "float32", **hardware: object
) -> RunFile:
    trainer = {
        "lora": lora,
        "optim": {"moments": moments},
        "name": "x",
        "model": {"path": str(folder)},
        "data": {"train": "-", "sequence_length": 4096},
        "batch": {"sequences": sequences},
    }
    return RunFile.model_validate({"trainer": trainer, "hardware": hardware})


@pytest.fixture(scope="module")
def shape(folder: Path) -> Shape:
    return model_shape(run_of(folder))


# GiB that torch.cuda.max_memory_allocated gave on an H200, with torch 2.11: tests/gpu/memory.py, benchmarks/h200-2026-11-30.md.
@pytest.mark.parametrize(
    ("length", "micro_batch", "recomputed", "measured"),
    [(4096, 8, 0, 90.88), (4096, 8, 14, 60.89), (4096, 8, 28, 30.90), (4096, 4, 0, 59.44), (4096, 1, 0, 35.84)],
)
def test_memory_is_what_was_measured(shape: Shape, length: int, micro_batch: int, recomputed: int, measured: float) -> None:
    needed = peak_bytes(shape, Choice(micro_batch, recomputed, "step"), 1, length, H200.memory_bytes)
    assert needed / GIB == pytest.approx(measured, rel=0.03)


def test_an_h200_takes_the_largest_micro_batch_that_fits_and_recomputes_nothing(shape: Shape) -> None:
    choice = choose(shape, H200, 16, 4096)
    assert choice == Choice(8, 0, "step")
    assert 16 * 4096 / step_times(shape, choice, H200, 16, 4096).step == pytest.approx(54_555, rel=0.05)


def test_with_adapters_the_base_is_kept_once_in_bfloat16_and_costs_no_gradients_of_its_own(folder: Path, shape: Shape) -> None:
    adapted = model_shape(run_of(folder, lora={"r": 16}))
    assert adapted.parameters - shape.parameters == adapted.trained == 18_464_768  # what peft counts, too
    assert state_bytes(adapted, Choice(1), 1) == 2 * shape.parameters + 18 * adapted.trained
    assert state_bytes(adapted, Choice(1, 0, "step"), 8) < state_bytes(shape, Choice(1, 0, "step"), 8) / 2
    node = machine_of(catalogue()["g6.12xlarge"], 2)
    assert node
    choice = Choice(4, 0, "step")
    full, lora = (step_times(one, choice, node, 64, 4096) for one in (shape, adapted))
    flops = [flops_per_token(one.parameters, one.trained, 28, 1536, 4096) for one in (adapted, shape)]
    assert 1 < lora.compute / full.compute * flops[1] / flops[0] < 1.3  # adapters' own products are small and slow
    alone = 16 * 4096 / step_times(adapted, Choice(8, 0, "step"), H200, 16, 4096).step
    assert alone == pytest.approx(60_708, rel=0.05)  # as measured: benchmarks/h200-2026-11-30.md
    assert peak_bytes(adapted, Choice(8, 0, "step"), 1, 4096, H200.memory_bytes) / GIB == pytest.approx(68.8, rel=0.03)
    assert lora.optimizer < 0.02 * full.optimizer
    with pytest.raises(InputError):
        choose(shape, Machine(GPUS["NVIDIA L4"], 22 * GIB), 8, 4096)
    assert choose(adapted, Machine(GPUS["NVIDIA L4"], 22 * GIB), 8, 4096).micro_batch >= 1


def test_parameters_that_are_frozen_for_good_have_no_moments(folder: Path, shape: Shape) -> None:
    run = run_of(folder)
    model = run.trainer.model.model_copy(update={"freeze": ["model.embed_tokens.*"]})
    frozen = model_shape(run.model_copy(update={"trainer": run.trainer.model_copy(update={"model": model})}))
    embedding = 151936 * 1536
    assert state_bytes(shape, Choice(1), 1) - state_bytes(frozen, Choice(1), 1) == 12 * embedding


def test_moments_in_bfloat16_take_four_bytes_less_of_a_parameter_and_more_of_a_step_to_be_widened(
    folder: Path, shape: Shape
) -> None:
    short = model_shape(run_of(folder, moments="bfloat16"))
    assert state_bytes(shape, Choice(1), 1) - state_bytes(short, Choice(1), 1) == 4 * shape.parameters
    before, after = (step_times(one, Choice(8, 0, "step"), H200, 16, 4096) for one in (shape, short))
    assert after.optimizer == pytest.approx(before.optimizer * 56 / 32)
    assert after.compute == before.compute


def test_a_model_of_7_b_is_fine_tuned_whole_on_one_h200_with_moments_in_bfloat16_alone(tmp_path: Path) -> None:
    Qwen2Config(**QWEN_7B, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    short = model_shape(run_of(tmp_path, moments="bfloat16"))
    assert choose(short, H200, 8, 4096) == Choice(2, 6, "step")
    assert peak_bytes(short, Choice(2, 6, "step"), 1, 4096, H200.memory_bytes) / GIB == pytest.approx(129.98, rel=0.03)  # measured
    wide = replace(short, moment_width=4)
    advice = r"set optim\.moments: bfloat16, which needs about 1\d\d GiB, or take more or larger GPUs$"
    with pytest.raises(InputError, match=advice):
        choose(wide, H200, 16, 4096)
    with pytest.raises(InputError, match=r"set lora, which needs about \d\d GiB, or take more or larger GPUs$"):
        choose(wide, replace(H200, memory_bytes=80 * GIB), 16, 4096)
    with pytest.raises(InputError, match=r"can be used; take more or larger GPUs, or lower data\.sequence_length$"):
        choose(wide, replace(H200, memory_bytes=16 * GIB), 16, 4096)


def test_what_is_set_is_kept_and_the_rest_follows(shape: Shape) -> None:
    assert choose(shape, H200, 16, 4096, micro_batch=2) == Choice(2, 0, "step")
    assert choose(shape, H200, 16, 4096, micro_batch=16).recomputed > 0
    assert choose(shape, H200, 16, 4096, micro_batch=8, recomputed=5).recomputed == 5
    small = replace(H200, memory_bytes=40 * GIB)
    assert choose(shape, small, 16, 16384).recomputed > 0


def test_what_cannot_fit_is_refused_with_the_numbers(shape: Shape) -> None:
    with pytest.raises(InputError, match=r"a sequence of 4096 tokens needs 2\d GiB of each GPU, and 20 GiB can be used; set lora"):
        choose(shape, Machine(GPUS["NVIDIA L4"], 22 * GIB), 8, 4096)


def test_one_efficiency_fitted_on_the_samples_efa_point_predicts_its_tcp_point(shape: Shape) -> None:
    node = machine_of(catalogue()["g6.12xlarge"], 2)
    assert node
    theirs = replace(shape, reduced=2)  # no master weights: gradients travel in bfloat16
    efa = step_times(theirs, Choice(1, 0, "block"), node, 8, 128)
    tcp = step_times(theirs, Choice(1, 0, "block"), replace(node, network=SOCKET_BYTES), 8, 128)
    assert 1 / efa.step == pytest.approx(SAMPLE_EFA, rel=0.02)
    assert 1 / tcp.step == pytest.approx(SAMPLE_TCP, rel=0.15)
    assert efa.transfers > 0.9 * efa.step


def test_staging_is_more_than_twenty_times_the_sample_on_the_same_gpus_and_computes_rather_than_waits(shape: Shape) -> None:
    node = machine_of(catalogue()["g6.12xlarge"], 2)
    assert node
    choice = choose(shape, node, 64, 4096)
    times = step_times(shape, choice, node, 64, 4096)
    assert 64 * 4096 / times.step > 20 * SAMPLE_EFA * 8 * 128
    assert times.transfers < 0.1 * times.step
    assert peak_bytes(shape, choice, 8, 4096, node.memory_bytes) < 0.93 * node.memory_bytes


def test_the_table_has_the_fitting_types_fastest_first_their_cost_and_why_others_cannot_be(folder: Path) -> None:
    text = plan(run_of(folder), 1, {"g6.12xlarge": 4.0})
    table, _, rest = text.partition("cannot be:")
    rows = {words[0]: words for line in table.splitlines() if (words := line.split()) and words[0] in catalogue()}
    speeds = [float(words[6].replace(",", "")) for words in rows.values()]
    assert speeds == sorted(speeds, reverse=True)
    assert float(rows["g6.12xlarge"][-1]) == pytest.approx(float(rows["g6.12xlarge"][-2]) * 4.0, rel=0.02)
    assert "g6.xlarge: a sequence of 4096 tokens needs" in rest
    assert "p6-b300.48xlarge" in rest.partition("not estimated")[2]


def test_the_runs_own_instance_type_is_refused_where_it_cannot_be(folder: Path) -> None:
    with pytest.raises(InputError, match=r"^1 x g6\.xlarge: a sequence of 4096 tokens needs"):
        plan(run_of(folder, 8, nodes=1, instance_type="g6.xlarge"), None, {})
    with pytest.raises(InputError, match=r"^2 x g6\.12xlarge: batch\.sequences is 4, and there are 8 GPUs"):
        plan(run_of(folder, 4, nodes=2, instance_type="g6.12xlarge"), None, {})
