"""The command line as a user meets it: exit codes, sentences, and a real run under Ray Train."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import run_processes
from safetensors.torch import load_file, save_file
from tiny import save_model, settings, write_rows
from training import run_training, weights

from trainer import plan
from trainer.cli import main
from trainer.config import RunFile
from trainer.driver import prepare
from trainer.storage import open_storage

ALONE = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
OFFLINE = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT = os.environ | OFFLINE


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(settings(folder, **changes)))
    return path


def refusal(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the command line in this process, expects exit code 2, and returns what it says."""
    monkeypatch.setattr(sys, "argv", ["ray-finetune", *arguments])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capsys.readouterr()  # what making the model printed
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized()
    text = capsys.readouterr().err.strip()
    assert text.startswith("error: ")
    return text


def no_weights(folder: Path) -> None:
    for file in (folder / "model").glob("*.safetensors"):
        file.unlink()


def no_template(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").unlink()


def blocked_storage(folder: Path) -> None:
    (folder / "runs").write_text("a file where the folder should be")


def bad_line(folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"messages": [}\n')


def no_assistant(folder: Path) -> None:
    with (folder / "eval.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "x"}]}\n')


def large_tokenizer(folder: Path) -> None:
    change_model_config(folder, vocab_size=100)


def change_model_config(folder: Path, **changes: Any) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def broken_config(folder: Path) -> None:
    change_model_config(folder, num_key_value_heads=0)


def few_positions(folder: Path) -> None:
    change_model_config(folder, max_position_embeddings=64)


def other_shape(folder: Path) -> None:
    change_model_config(folder, hidden_size=64)


def broken_tokenizer(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").write_text("{")


def truncated_weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])


def missing_tensor(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != "model.norm.weight"}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (no_weights, "model.path: {folder}/model holds no *.safetensors weights; give a folder that does, or set model.gguf_file"),
        (
            no_template,
            "{folder}/train.jsonl:1: the model's tokenizer has no chat template for messages; set data.chat_template (40 rows)",
        ),
        (blocked_storage, "storage.uri: cannot write to {folder}/runs/tiny-"),
        (bad_line, "{folder}/train.jsonl:41: not valid JSON (Expecting value at column 15); write one JSON object a line"),
        (no_assistant, "{folder}/eval.jsonl:11: no turn of assistant to learn from; add one or remove the row"),
        (large_tokenizer, "the model 100; give a tokenizer that belongs to it"),
        (broken_config, "model.path: {folder}/model is no causal language model that can be trained ("),
        (broken_tokenizer, "model.path: {folder}/model has no tokenizer that can be read ("),
        (truncated_weights, "model.path: {folder}/model/model.safetensors is damaged ("),
        (other_shape, "but config.json says [320, 64]; give files that belong together"),
        (missing_tensor, "lacks the weights model.norm.weight (1 in all); give a complete model"),
        (few_positions, "data.sequence_length: 128 is more than the model's 64 positions; lower it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_ray_starts(
    tmp_path: Path, damage: Any, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    damage(tmp_path)
    text = refusal(["train", "--config", str(config)], monkeypatch, capsys)
    assert sentence.format(folder=tmp_path) in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optim": {"lr": 1e-3, "learnin_rate": 1}}, "optim.learnin_rate: unknown setting; known are lr"),
        ({"data": {"train": "nowhere.jsonl"}}, "data.train: nowhere.jsonl: No such file or directory; give files that end in"),
        ({"model": {"path": "./nowhere"}}, "model.path: ./nowhere is no folder; give an existing one, an s3:// folder or a Hub id"),
        ({"model": {"path": "org/nothing"}}, "model.path: org/nothing is no local folder, and the Hub did not give it"),
        ({"model": {"gguf_file": "none.gguf"}}, "none.gguf does not exist; name a file in model.path"),
        ({"model": {"freeze": ["nothing.*"]}}, "model.freeze: no parameter is named like nothing.*"),
        ({"attention": "flash_attention_2"}, "attention: flash_attention_2 needs the package flash-attn"),
        (
            {"storage": {"uri": "s3://bucket/r", "endpoint_url": "http://bad host"}},
            "storage: no S3 client can be made for s3://bucket/r/tiny-",
        ),
    ],
)
def test_bad_settings_are_one_sentence_and_exit_code_2(
    tmp_path: Path, changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(["train", "--config", str(write_config(tmp_path, **changes))], monkeypatch, capsys)
    assert sentence in text
    assert len(text.splitlines()) == 1


def test_before_workers_start_it_is_said_that_a_models_memory_may_be_too_small_and_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = plan.catalogue()["g6.xlarge"]
    run = RunFile.model_validate({"trainer": settings(tmp_path), "hardware": {"gpus_per_node": 1, "instance_type": "g6.xlarge"}})
    said: list[str] = []
    prepare(run, open_storage(run.uri, run.trainer.storage), said.append)
    assert not [line for line in said if line.startswith("memory:")]
    monkeypatch.setattr(plan, "catalogue", lambda: {"g6.xlarge": gpu | {"gpu_mem_mib_each": 0.1}})
    prepare(run, open_storage(run.uri, run.trainer.storage), said.append)
    [line] = [line for line in said if line.startswith("memory:")]
    assert line.startswith("memory: perhaps too small: g6.xlarge: a sequence of 128 tokens needs 0 GiB of each GPU")


def test_more_workers_than_sequences_of_a_step_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(["train", "--config", str(write_config(tmp_path)), "--workers", "5"], monkeypatch, capsys)
    assert text == "error: batch.sequences: 3 sequences a step leave 2 of 5 workers idle; write at least 5, or take fewer workers"


def test_a_missing_settings_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(["train", "--config", str(tmp_path / "no.json")], monkeypatch, capsys)
    assert text == f"error: {tmp_path}/no.json: No such file or directory; give an existing settings file"


def test_data_that_changed_under_a_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    run_processes(1, run_training, json.loads(config.read_text()), 1)
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:-1]))
    text = refusal(["train", "--config", str(config)], monkeypatch, capsys)
    assert "data.train: " in text
    assert text.endswith("has changed since this run began; set data.version to start a new run")


def test_config_prints_every_default_and_the_schema(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    command = [sys.executable, "-m", "trainer", "config", "--config", str(config), "--set", "seed=7"]
    resolved = json.loads(subprocess.run(command, capture_output=True, check=True, env=ENVIRONMENT).stdout)
    assert resolved["trainer"]["seed"] == 7
    assert resolved["trainer"]["optim"]["beta2"] == 0.95
    schema = json.loads(subprocess.run([*command[:4], "--schema"], capture_output=True, check=True, env=ENVIRONMENT).stdout)
    assert schema["additionalProperties"] is False


def start(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer", "train", "--config", str(config), "--workers", "2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | OFFLINE)


def test_a_run_under_ray_stops_on_sigterm_resumes_and_ends_as_one_without_ray(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"duration": {"steps": 150}, "checkpoint": {"every_steps": 1000}}
    config = write_config(tmp_path, **changes)
    first = start(config)
    assert first.stdout
    lines = []
    for line in first.stdout:
        lines.append(line)
        if "step   5/" in line:
            first.send_signal(signal.SIGTERM)
    assert first.wait(120) == 75, "".join(lines)
    [run] = (tmp_path / "runs").glob("tiny-*")
    stopped = json.loads((run / "outcome.json").read_text())
    assert stopped["outcome"] == "interrupted"
    assert 5 < stopped["step"] < 150
    assert 0 < stopped["save_seconds"] < 20
    assert f"saved {stopped['save_seconds']} s after it was asked to" in "".join(lines)
    assert "svg" in (run / "report.html").read_text()

    second = start(config)
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 0, output
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == list(range(1, 151))
    assert f"step {stopped['step'] + 1:>3}/150" in output
    assert f"step {stopped['step']:>3}/150" not in output
    assert re.search(rf"^step {stopped['step'] + 1} is the first new one on 2 workers, after [\d.]+ s$", output, re.MULTILINE)
    assert re.search(
        r"held-out: loss \d\.\d+, perplexity [\d.]+, [\d.]+% of tokens right \(loss before: \d\.\d+\)\n  .*\n    before: .*\n    after:  ",
        output,
    )
    assert json.loads((run / "outcome.json").read_text())["outcome"] == "complete"

    third = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer", "train", "--config", str(config)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert (third.returncode, third.stdout) == (0, f"{run} is complete (step 150); change a setting to train another\n")
    imported = {line.rpartition("|")[2].strip() for line in third.stderr.splitlines()}
    assert "trainer.driver" in imported
    assert not imported & {"ray", "transformers", "trainer.inputs"}  # which would take seconds, and a cluster

    alone = settings(tmp_path, storage={"uri": str(tmp_path / "alone")}, **changes)
    [result, _] = run_processes(2, run_training, alone)
    ours, theirs = weights(str(run)), weights(result["uri"])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(theirs[name], tensor) for name, tensor in base_weights(tmp_path).items())


def base_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trainer", *arguments], capture_output=True, text=True, env=ENVIRONMENT)


def test_stop_makes_a_run_save_and_leave_and_status_tells_of_it(tmp_path: Path) -> None:
    config = write_config(tmp_path, duration={"steps": 2000}, checkpoint={"every_steps": 1000})
    assert "step        0" in command("status", "--config", str(config)).stdout
    run = start(config)
    assert run.stdout
    for line in run.stdout:
        if "step    5/" in line:
            break
    asked = command("stop", "--wait")
    assert asked.stdout == "asked the run to save and leave\n", asked.stderr
    assert run.wait(120) == 75
    told = command("status", "--config", str(config)).stdout
    step = int(re.findall(r"step        (\d+) of 2000", told)[0])
    assert 5 < step < 2000
    assert "outcome     interrupted\n" in told
    assert f"checkpoint  step {step}\n" in told
    assert re.search(r"^started     step 1 is the first new one on 2 workers, after [\d.]+ s$", told, re.MULTILINE)
    [seconds] = re.findall(r"^saved       ([\d.]+) s after it was asked to stop$", told, re.MULTILINE)
    print(f"{seconds} s from the wish to a complete checkpoint")
    assert float(seconds) < 20
    assert command("stop", "--wait").stdout == "no run is under way here\n"


def test_preflight_says_what_training_would_say_and_starts_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    good = command("preflight", "--config", str(config))
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, f"ready: {next((tmp_path / 'runs').glob('tiny-*'))}")
    assert "40 rows" in good.stdout
    bad_line(tmp_path)
    refused = command("preflight", "--config", str(config))
    assert refused.returncode == 2
    assert f"{tmp_path}/train.jsonl:41: not valid JSON" in refused.stderr


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    config = write_config(tmp_path, optim={"lr": 1e30, "clip_norm": None}, checkpoint={"every_steps": 2})
    save_model(tmp_path / "model")
    command = [sys.executable, "-m", "trainer", "train", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, env=ALONE)
    assert ended.returncode == 1
    assert re.search(
        r"failed: the (loss|gradient norm) of step 2 is nan; lower optim.lr, or raise schedule.warmup_steps$", ended.stderr.strip()
    )
    [run] = (tmp_path / "runs").glob("tiny-*")
    assert json.loads((run / "outcome.json").read_text())["outcome"] == "failed"
    assert not list((run).glob("checkpoints/*/manifest.json"))


def test_a_full_disk_ends_the_run_with_its_reason_and_a_later_start_goes_on(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint={"every_steps": 2})
    limited = f"ulimit -f 150; exec {sys.executable} -m trainer train --config {config}"
    ended = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, env=ALONE)
    assert ended.returncode == 1
    assert "failed: the last checkpoint could not be stored: " in ended.stderr
    [run] = (tmp_path / "runs").glob("tiny-*")
    assert json.loads((run / "outcome.json").read_text())["outcome"] == "failed"
    again = subprocess.run(
        [sys.executable, "-m", "trainer", "train", "--config", str(config)], capture_output=True, text=True, env=ALONE
    )
    assert again.returncode == 0, again.stderr


def test_lines_that_nobody_reads_do_not_end_a_run(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    command = f"set -o pipefail; {sys.executable} -m trainer train --config {config} | head -2"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ALONE)
    assert ended.returncode == 0, ended.stderr
    [run] = (tmp_path / "runs").glob("tiny-*")
    assert json.loads((run / "outcome.json").read_text())["outcome"] == "complete"


def test_other_prompts_after_a_resume_do_not_break_the_end(tmp_path: Path) -> None:
    run_processes(1, run_training, settings(tmp_path), 1)
    config = write_config(tmp_path, evaluate={"prompts": 3})
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "train", "--config", str(config)], capture_output=True, text=True, env=ALONE
    )
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """A client of a Ray cluster of this machine that takes jobs, as the head of a RayJob does."""
    import ray
    from ray.job_submission import JobSubmissionClient

    ray.init(
        address="local", include_dashboard=True, dashboard_port=8265, num_cpus=2, object_store_memory=2**27, log_to_driver=False
    )
    try:
        yield JobSubmissionClient("http://127.0.0.1:8265")
    finally:
        ray.shutdown()


def test_a_refused_run_that_is_a_ray_job_ends_as_stopped_which_kuberay_does_not_retry(tmp_path: Path, jobs: Any) -> None:
    config = write_config(tmp_path)
    bad_line(tmp_path)
    job = jobs.submit_job(
        entrypoint=f"{sys.executable} -m trainer train --config {config}", runtime_env={"env_vars": {"HF_HUB_OFFLINE": "1"}}
    )
    deadline = time.monotonic() + 180
    while not (status := jobs.get_job_status(job)).is_terminal():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert status == "STOPPED", jobs.get_job_logs(job)
    [run] = (tmp_path / "runs").glob("tiny-*")
    outcome = json.loads((run / "outcome.json").read_text())
    assert outcome["outcome"] == "refused"
    assert "train.jsonl:41: not valid JSON" in outcome["cause"]


def test_a_stop_while_rows_are_tokenised_lets_the_run_go(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    write_rows(tmp_path / "train.jsonl", 60_000)
    run = subprocess.Popen([sys.executable, "-m", "trainer", "train", "--config", str(config)], env=ALONE)
    deadline = time.monotonic() + 120
    while not psutil.Process(run.pid).children():  # the processes that tokenise
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 75
    [folder] = (tmp_path / "runs").glob("tiny-*")
    assert json.loads((folder / "outcome.json").read_text())["outcome"] == "interrupted"
    assert json.loads((folder / "owner.json").read_text())["released"] is True
