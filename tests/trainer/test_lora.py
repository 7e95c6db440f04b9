"""LoRA: what is trained, what is kept of it, and that peft reads what a run leaves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from safetensors import safe_open
from safetensors.torch import load_file
from test_parallel import relative
from test_resume import losses
from tiny import save_model, settings
from training import loss_and_gradients, run_training, step_facts
from transformers import AutoModelForCausalLM

from trainer.config import InputError, RunFile, TrainerConfig, parse_settings
from trainer.driver import open_run
from trainer.model import build_model

# In a fresh process, which has nothing of ours: the base model with what peft makes of the adapters.
LOAD = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    out = model(torch.arange(3, 40).unsqueeze(0)).logits
names = [name for name, _ in model.named_parameters() if "lora_" in name]
print(json.dumps({"logits": out[0].tolist(), "adapted": len(names), "type": type(model).__name__}))
"""
ADAPTED = 2 * 7  # linear layers of the tiny model's two blocks


def lora_settings(folder: Path, family: str = "qwen2", lora: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    adapters = {"r": 4, "alpha": 8} | (lora or {})
    return settings(folder, family, lora=adapters, **{"optim": {"lr": 1e-2}} | changes)


def logits_in_peft(folder: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", LOAD, folder], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # with a tied head, and without
def test_peft_loads_the_adapters_in_a_fresh_process_and_gives_the_logits_of_the_merged_model(tmp_path: Path, family: str) -> None:
    short: dict[str, Any] = {"duration": {"steps": 2}, "schedule": {"warmup_steps": 0}}
    uris = {}
    for merge in (False, True):
        values = lora_settings(tmp_path, family, {"merge": merge}, **short)
        uris[merge] = Path(run_processes(2, run_training, values)[0]["uri"], "model")
    loaded = logits_in_peft(uris[False])
    assert loaded["adapted"] == 2 * ADAPTED
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        base, merged = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0] for folder in (tmp_path / "model", uris[True]))
    assert torch.allclose(merged, torch.tensor(loaded["logits"]), atol=1e-5)
    assert (merged - base).abs().max() > 0.01
    kept, before = load_file(uris[True] / "model.safetensors"), load_file(tmp_path / "model" / "model.safetensors")
    assert kept.keys() == before.keys()
    assert {name for name in kept if torch.equal(kept[name], before[name])} == {n for n in kept if not n.endswith("_proj.weight")}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, Any]]]:
    """Facts of step 1 by number of processes, and by what two of them do."""
    values = lora_settings(tmp_path_factory.mktemp("steps"), batch={"sequences": 4, "micro_batch": 1})
    return {size: run_processes(size, step_facts, values) for size in (1, 2, 3)} | {
        "recomputed": run_processes(2, step_facts, values, "step", 2)
    }


@pytest.mark.parametrize("size", [2, 3, "recomputed"])
def test_loss_and_gradients_of_adapters_are_the_same_at_any_number_of_processes(steps: Any, size: int | str) -> None:
    alone = steps[1][0]
    assert len(alone["gradients"]) == 2 * ADAPTED
    for facts in steps[size]:
        assert facts["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert facts["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert facts["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in facts["gradients"].items():
            assert relative(gradient, alone["gradients"][name]) < 1e-5, name
    assert all(gradient.any() for gradient in alone["gradients"].values())


def test_packed_rows_give_adapters_the_gradients_of_rows_alone(tmp_path: Path) -> None:
    values = lora_settings(tmp_path, data={"sequence_length": 256})
    rows = list(range(8))
    [packed] = run_processes(1, loss_and_gradients, values, [rows[:5], rows[5:]])
    [alone] = run_processes(1, loss_and_gradients, values, [[row] for row in rows])
    assert packed["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert len(packed["gradients"]) == 2 * ADAPTED
    for name, gradient in packed["gradients"].items():
        assert relative(gradient, alone["gradients"][name]) < 1e-5, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


def named(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    # Dropout, so that its random numbers are seen to be the step's.
    return lora_settings(folder, lora={"dropout": 0.1}, storage={"uri": str(folder / name)}, **changes)


def plain(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    return lora_settings(folder, storage={"uri": str(folder / name)}, **changes)


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    return run_processes(2, run_training, named(folder, "whole"))[0]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """One process without dropout, in float32."""
    return run_processes(1, run_training, plain(folder, "alone"))[0]


def adapter(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(Path(result["uri"], "model", "adapter_model.safetensors"))


def test_the_loss_falls_and_the_run_is_complete_with_adapters_alone(whole: dict[str, Any]) -> None:
    measured = [row["eval_loss"] for row in whole["rows"] if "eval_loss" in row]
    assert measured[-1] < measured[0] - 0.05
    run = RunFile.model_validate_json(Path(whole["uri"], "run.json").read_text())
    Path(whole["uri"], "outcome.json").write_text(json.dumps({"outcome": "complete", "step": 8}))
    assert open_run(run)[1] == 8
    assert not list(Path(whole["uri"], "model").glob("model*.safetensors"))


def test_a_checkpoint_holds_adapters_and_their_moments_and_nothing_of_the_base_model(whole: dict[str, Any]) -> None:
    names = set()
    for file in Path(whole["uri"], "checkpoints", "step-00000008.a0001").glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            names |= set(weights.keys())
    assert len(names) == 3 * 2 * ADAPTED
    assert all(".lora_A" in name or ".lora_B" in name for name in names)


def test_interrupted_and_resumed_adapters_end_bitwise_equal_also_with_dropout(folder: Path, whole: dict[str, Any]) -> None:
    values = named(folder, "twice", checkpoint={"every_steps": 100})
    parts = [run_processes(2, run_training, values, stop)[0] for stop in (3, None)]
    assert [part["ending"] for part in parts] == ["interrupted", "complete"]
    assert losses(parts) == losses([whole])
    kept, again = adapter(whole), adapter(parts[-1])
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_adapters_resume_at_another_number_of_workers_with_the_same_losses(folder: Path, alone: dict[str, Any]) -> None:
    values = plain(folder, "elastic")
    parts = [run_processes(size, run_training, values, stop)[0] for size, stop in ((2, 1), (3, 4), (1, None))]
    assert losses(parts) == pytest.approx(losses([alone]), rel=1e-5)


def test_a_base_model_that_changed_under_a_run_is_refused_when_it_resumes(tmp_path: Path) -> None:
    values = lora_settings(tmp_path)
    run_processes(2, run_training, values, 3)
    save_model(tmp_path / "model", seed=1)
    with pytest.raises(
        AssertionError, match=r"InputError: model\.path: the frozen weights in .*/model are not those that this run"
    ):
        run_processes(1, run_training, values)
    save_model(tmp_path / "model")
    assert run_processes(1, run_training, values)[0]["ending"] == "complete"


def in_bfloat16(values: dict[str, Any]) -> dict[str, Any]:
    """What a run in bfloat16 trains, and the types of its parameters."""
    import trainer.train as module

    made = []
    build = module.build_optimizer
    module.build_optimizer = lambda model, config: (made.append(model), build(model, config))[1]
    result = run_training(values)
    kinds = {(p.dtype, p.requires_grad) for p in made[0].parameters()}
    return result | {"types": kinds, "copies": len(made[0].copies.copies) if made[0].copies else None}


@pytest.mark.parametrize("size", [1, 2])
def test_in_bfloat16_the_base_is_kept_in_it_and_adapters_in_float32(folder: Path, alone: dict[str, Any], size: int) -> None:
    values = plain(folder, f"bfloat16-{size}", precision="bfloat16")
    [result, *_] = run_processes(size, in_bfloat16, values)
    assert result["types"] == {(torch.bfloat16, False), (torch.float32, True)}
    assert result["copies"] == (2 * ADAPTED if size == 1 else None)
    assert losses([result]) == pytest.approx(losses([alone]), rel=0.01)
    assert {tensor.dtype for tensor in adapter(result).values()} == {torch.float32}


def test_only_the_layers_that_are_named_get_an_adapter(tmp_path: Path) -> None:
    values = lora_settings(tmp_path, lora={"target_modules": ["q_proj", "layers.1.mlp.down_proj"]})
    model = build_model(tmp_path / "model", TrainerConfig.model_validate(values), "sdpa")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"}
    assert trained == {f"{layer}.{part}" for layer in layers for part in ("lora_A", "lora_B")}


@pytest.mark.parametrize("target", ["q_prj", "lm_head", "proj", "embed_tokens"])
def test_a_target_that_is_no_linear_layer_of_the_blocks_is_refused_with_those_that_are(tmp_path: Path, target: str) -> None:
    values = lora_settings(tmp_path, lora={"target_modules": ["q_proj", target]})
    with pytest.raises(InputError) as refused:
        build_model(tmp_path / "model", TrainerConfig.model_validate(values), "sdpa")
    known = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert str(refused.value) == f"lora.target_modules: no linear layer of the blocks is named {target}; they are named {known}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora": {"r": 0}}, "s: lora.r: input should be greater than or equal to 1, not 0"),
        ({"lora": {"dropout": 1}}, "s: lora.dropout: input should be less than 1, not 1"),
        ({"lora": {"lora_alpha": 8}}, "s: lora.lora_alpha: unknown setting; did you mean alpha?"),
        ({"lora": {"target_modules": []}}, "s: lora.target_modules: list should have at least 1 item"),
        ({"lora": {"target_modules": 1}}, "s: lora.target_modules: input should be a valid list, not 1"),
        ({"lora": {}, "model": {"path": "m", "added_tokens": ["<|x|>"]}}, "s: settings: with lora, model.added_tokens would never"),
        ({"lora": {}, "model": {"path": "m", "freeze": ["*"]}}, "s: settings: with lora, all that model.freeze names is frozen"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_settings(TrainerConfig, {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}} | changes, "s")
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


def test_adapters_change_the_fingerprint_and_a_run_without_keeps_its_own(tmp_path: Path) -> None:
    sections: list[dict[str, Any] | None] = [None, {}, {"r": 8}, {"merge": True}]
    made = [TrainerConfig.model_validate(settings(tmp_path) | {"lora": section}) for section in sections]
    assert len({one.fingerprint() for one in made}) == 4
    assert "lora" not in TrainerConfig.model_validate(settings(tmp_path)).result()
