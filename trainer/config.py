"""Every setting of the trainer, declared once, and the run file the chart renders.

Importable without torch, transformers or ray: the chart's schema, the driver's checks and the command line all
read these models. It owns names, bounds, defaults and the fingerprint; it touches no file but the one it is given.
"""

import contextlib
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

# Part of the fingerprint: raised whenever packing or shuffling would order the same rows differently.
ORDER_VERSION = 1


S = TypeVar("S", bound="Settings")


class InputError(ValueError):
    """What the user gave cannot be used. The message is one sentence: what, where, and what to write instead."""


@contextlib.contextmanager
def refusing(what: str, advice: str) -> Iterator[None]:
    """Turns whatever a library says of the user's files into one InputError sentence: `what` (its reason); `advice`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{what} ({reason}); {advice}") from None


class RunError(RuntimeError):
    """The run ended by an error that is not the input's. The message ends with the cause."""


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class StorageConfig(Settings):
    uri: str = Field(default="runs", min_length=1, pattern=r"^(s3://[a-z0-9][a-z0-9.-]+[a-z0-9](/.*)?|[^:]+)$")
    """Where runs are kept: `s3://bucket/prefix` or a local folder. A run's folder is `<uri>/<name>-<fingerprint>`."""

    endpoint_url: str | None = Field(default=None, pattern=r"^https?://.+$")
    """URL of an S3-compatible server for all S3 use; null means AWS, or the AWS_ENDPOINT_URL variables."""

    region: str | None = None
    """AWS region of the bucket; null means the region of the environment."""

    path_style: bool = False
    """Address buckets as `host/bucket` instead of `bucket.host`, which most S3-compatible servers need."""


class ModelConfig(Settings):
    path: str = Field(min_length=1)
    """The base model: a local folder, an `s3://` folder, or a Hugging Face Hub id."""

    revision: str | None = None
    """Branch, tag or commit of a Hub model; null means its main branch."""

    gguf_file: str | None = Field(default=None, pattern=r"^[^/]+\.gguf$")
    """Name of a GGUF file in `path`, dequantised once into the model cache; null means safetensors weights."""

    added_tokens: list[Annotated[str, Field(pattern=r"\S")]] = []
    """Special tokens that the tokenizer lacks, such as `<|tool|>`; the embeddings grow where they have no room."""

    freeze: list[str] = []
    """Parameters that are not trained, as shell-style patterns of their names, such as `model.embed_tokens.*`."""


def _names(value: Any) -> Any:
    """One name is a list of one."""
    return [value] if isinstance(value, str) else value


_Name = Annotated[str, Field(min_length=1)]
Names = Annotated[
    list[_Name],
    Field(min_length=1),
    BeforeValidator(_names, json_schema_input_type=_Name | Annotated[list[_Name], Field(min_length=1)]),
]


class LoraConfig(Settings):
    r: int = Field(default=16, ge=1)
    """Rank of the adapters: rows of each layer's matrix A, and columns of its matrix B."""

    alpha: int = Field(default=32, ge=1)
    """An adapter's output is scaled by alpha / r."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are dropped in training."""

    target_modules: Names = ["all-linear"]
    """Linear layers that get an adapter: ends of their names, such as `q_proj`, or `all-linear`, which are those of all blocks."""

    merge: bool = False
    """Export the whole model with its adapters added to the weights, instead of the adapters alone in peft's files."""


class SourceConfig(Settings):
    path: str = Field(min_length=1)
    """Rows: a file, a glob or a folder, local or `s3://` (.jsonl or .json, also .gz or .zst; .parquet), or a Hugging Face dataset id."""

    name: str | None = None
    """Configuration of a Hugging Face dataset; null means its default one."""

    split: str = Field(default="train", min_length=1)
    """Split of a Hugging Face dataset, such as `train` or `test_sft`; a part of one (`train[:10%]`) is not read."""

    revision: str | None = None
    """Branch, tag or commit of a Hub dataset; null means its main branch, as the run's first attempt finds it."""

    weight: float = Field(default=1.0, gt=0, le=1000)
    """Times that an epoch sees each row of it; at 0.5 it sees half of them, and the next epoch the other half."""


def _sources(value: Any) -> Any:
    """A path alone, or among others, is a source of weight 1."""
    if isinstance(value, dict):  # several sets by name are written so, and only for `eval`
        raise ValueError("write a list of sources, such as [{path: rows.jsonl, weight: 2}]")
    if isinstance(value, str):
        value = [value]
    return [{"path": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value


def _named(value: Any) -> Any:
    """One set needs no name."""
    return {"eval": value} if isinstance(value, (str, list)) else value


# What may be written is wider than what is kept, so each of these types has a second form for the JSON schema.
_Path = Annotated[str, Field(min_length=1)]
Sources = Annotated[
    list[SourceConfig],
    Field(min_length=1),
    BeforeValidator(_sources, json_schema_input_type=_Path | Annotated[list[_Path | SourceConfig], Field(min_length=1)]),
]
SetName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")]
_Named = Annotated[dict[SetName, Sources], Field(min_length=1, json_schema_extra={"additionalProperties": False})]
EvalSets = Annotated[dict[SetName, Sources], Field(min_length=1), BeforeValidator(_named, json_schema_input_type=Sources | _Named)]
Role = Literal["system", "user", "assistant", "tool"]


class DataConfig(Settings):
    train: Sources
    """Training rows: a path, or a list of paths or of sources, each with its weight in the mixture."""

    eval: EvalSets | None = None
    """Held-out rows: a path, a list, or several sets by name; null means none but `eval_fraction`'s."""

    eval_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the training rows held out, by their content, so that equal rows stay together; with no `eval`."""

    version: str | None = None
    """Any text; changing it says that the files hold new data and starts a new run."""

    sequence_length: int = Field(default=2048, ge=8)
    """Tokens in one packed sequence."""

    long_rows: Literal["error", "truncate", "split"] = "error"
    """A row longer than `sequence_length`: refuse it, keep its first tokens, or cut it into rows of that length."""

    invalid_rows: Literal["error", "skip"] = "error"
    """A row that cannot be trained on: refuse the data, or leave it out and count it."""

    max_skipped_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Largest share of rows that `skip` may leave out; more of them refuse the data."""

    supervised_roles: list[Role] = Field(default=["assistant"], min_length=1)
    """Roles of `messages` whose turns are learnt; a prompt's completion and a plain text always are."""

    last_turn_only: bool = False
    """Learn the last supervised turn of a conversation only."""

    chat_template: str | None = Field(default=None, min_length=1)
    """Jinja text, or the path of a file with it, instead of the tokenizer's own chat template; exported with the model."""

    @model_validator(mode="after")
    def _eval_beside_train(self) -> "DataConfig":
        if self.eval is not None and self.eval_fraction is not None:
            raise ValueError("only one of eval and eval_fraction may be set")
        if self.eval is not None and "train" in self.eval:
            raise ValueError("the evaluation set train has the training rows' name; give it another")
        return self


class BatchConfig(Settings):
    sequences: int = Field(default=8, ge=1)
    """Packed sequences in one optimiser step, over all workers together."""

    micro_batch: int | None = Field(default=None, ge=1)
    """Sequences that one worker runs at once, the rest of its share one after another; null means what is fastest in the GPU's memory."""


class OptimConfig(Settings):
    lr: float = Field(default=2e-5, gt=0)
    """Peak learning rate of AdamW."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment, per step."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment, per step."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases are never decayed."""

    moments: Literal["float32", "bfloat16"] = "float32"
    """Type in which both moments are kept; in bfloat16, rounded once a step, they take 4 bytes of a parameter instead of 8."""

    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of the whole model's gradient; null means that it is not clipped."""

    max_skipped_steps: int = Field(default=0, ge=0)
    """Steps of a run that may be left out as their gradient is no number (nan or infinite); one more ends the run."""

    @model_validator(mode="after")
    def _moments_decay(self) -> "OptimConfig":
        # Two neighbours in bfloat16 lie up to 1/128 apart: what decays by less than half of that is rounded to what it was.
        slowest = max((self.beta1, "beta1"), (self.beta2, "beta2"))
        if self.moments == "bfloat16" and slowest[0] > 0.995:
            raise ValueError(
                f"a moment in bfloat16 is rounded back to what it was at {slowest[1]} {slowest[0]:g}; "
                "set it to 0.99 or less, or moments to float32"
            )
        return self


class ScheduleConfig(Settings):
    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up; `wsd` is constant, then linear over the last `decay_fraction`."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly to its peak."""

    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    """The same as a share of all steps, rounded up, as of a run whose length is given in epochs; null means `warmup_steps`."""

    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """The learning rate at the end, as a share of the peak."""

    decay_fraction: float = Field(default=0.1, gt=0, le=1)
    """Share of all steps in which `wsd` decays; other schedules take no notice of it."""

    @model_validator(mode="after")
    def _one_warm_up(self) -> "ScheduleConfig":
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError("only one of warmup_steps and warmup_ratio may be set")
        return self


class DurationConfig(Settings):
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training rows."""

    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps."""

    tokens: int | None = Field(default=None, ge=1)
    """Training tokens, padding not counted; the run ends with the step that reaches them."""

    @model_validator(mode="after")
    def _one(self) -> "DurationConfig":
        if sum(value is not None for value in (self.epochs, self.steps, self.tokens)) != 1:
            raise ValueError("exactly one of epochs, steps and tokens must be set")
        return self


class CheckpointConfig(Settings):
    every_steps: int = Field(default=100, ge=1)
    """Steps between two checkpoints; one is always written at the end and when the run is interrupted."""

    keep_last: int = Field(default=2, ge=1)
    """Complete checkpoints kept, the newest ones."""

    keep_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that this number divides are kept for good as well; null means none."""


class EvaluateConfig(Settings):
    every_steps: int | None = Field(default=None, ge=1)
    """Steps between two evaluations of `data.eval`; null means only before the first step and after the last."""

    prompts: int = Field(default=2, ge=0)
    """Held-out prompts answered before and after training, for the report."""

    max_new_tokens: int = Field(default=32, ge=1)
    """Longest answer to such a prompt, in tokens."""


class BestConfig(Settings):
    metric: str = Field(default="eval_loss", pattern=r"^eval_([a-z][a-z0-9_]*_)?(loss|perplexity|accuracy)$")
    """Figure of the held-out rows, as metrics.jsonl names it: `eval_loss`, `eval_accuracy`, or `eval_<set>_loss` of one set."""

    min_delta: float = Field(default=0.0, ge=0)
    """Change by which a figure must be better than the best before it: lower, or for accuracy higher."""

    patience: int | None = Field(default=None, ge=1)
    """Evaluations in a row without a better one after which training ends; null means that it goes on to its last step."""

    export: bool = False
    """Export the weights of the best evaluation, instead of the last ones."""

    @property
    def rises(self) -> bool:
        """Whether more is better."""
        return self.metric.endswith("_accuracy")


class TrainerConfig(Settings):
    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$")
    """The run's name: lower-case letters, digits and dashes."""

    model: ModelConfig
    """What is fine-tuned."""

    data: DataConfig
    """What it is trained and evaluated on."""

    lora: LoraConfig | None = None
    """Low-rank adapters that are trained instead of the weights, at some ten times the `optim.lr`; null means that the weights are."""

    duration: DurationConfig = DurationConfig(epochs=1)
    """How long it trains."""

    storage: StorageConfig = StorageConfig()
    """Where the run's folder lies."""

    batch: BatchConfig = BatchConfig()
    """What one optimiser step sees."""

    optim: OptimConfig = OptimConfig()
    """The optimiser, AdamW."""

    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over time."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run can be resumed from."""

    evaluate: EvaluateConfig = EvaluateConfig()
    """What is measured on held-out rows."""

    best: BestConfig | None = None
    """Which evaluation is the best: its checkpoint is kept beside the newest ones; null means that none is looked for."""

    precision: Literal["auto", "bfloat16", "float8", "float32"] = "auto"
    """Type of the computation; `auto` is bfloat16 on a GPU and float32 on a CPU, `float8` is bfloat16 but for the products of the
    blocks' large layers. Master weights are always float32."""

    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel; `auto` is torch's variable-length kernels on a GPU where they fit the model, else sdpa with a mask."""

    recompute_blocks: int | None = Field(default=None, ge=0)
    """Blocks of the model that make their activations again in the backward pass; null means as few as the GPU's memory allows."""

    compile: bool | None = None
    """Compile the model's blocks with torch.compile; null means on a GPU where there is a C compiler for it."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the row order and of any dropout."""

    log_every_steps: int = Field(default=1, ge=1)
    """Steps between two lines of metrics.jsonl."""

    max_failures: int = Field(default=3, ge=1)
    """Worker failures that are mended by starting the workers again from the last checkpoint; one more ends the run."""

    hang_seconds: int = Field(default=900, ge=10)
    """Longest time of a step but the first, a save or a held-out batch; a worker that exceeds it is started again, with all others."""

    on_change: Literal["new_run", "refuse"] = "new_run"
    """Where the last run of this name had other settings that change the result: train another run beside it, or refuse with the
    differences."""

    takeover: bool = False
    """Take the run over from another Helm release that holds it, which then saves and leaves."""

    @model_validator(mode="after")
    def _lora_alone_is_trained(self) -> "TrainerConfig":
        if self.lora and self.model.added_tokens:
            raise ValueError("with lora, model.added_tokens would never be trained; remove one of the two")
        if self.lora and self.model.freeze:
            raise ValueError("with lora, all that model.freeze names is frozen already; remove one of the two")
        return self

    @model_validator(mode="after")
    def _float8_fits(self) -> "TrainerConfig":
        if self.precision != "float8":
            return self
        if self.lora:
            raise ValueError("precision: float8 is for training all weights; with lora, write bfloat16")
        if self.compile is False:
            raise ValueError("precision: float8 without compiled blocks is slower than bfloat16; leave out compile: false")
        if self.data.sequence_length % 16:
            raise ValueError(f"precision: float8 needs a data.sequence_length that 16 divides, not {self.data.sequence_length}")
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> "TrainerConfig":
        if self.best is None:
            return self
        if self.evaluate.every_steps is None:
            raise ValueError("best needs evaluations to choose from; set evaluate.every_steps")
        if self.data.eval is None and self.data.eval_fraction is None:
            raise ValueError("best needs held-out rows; set data.eval or data.eval_fraction")
        sets = list(self.data.eval or {})
        prefixes = ["eval", *(f"eval_{name}" for name in sets if len(sets) > 1)]
        if self.best.metric.rpartition("_")[0] not in prefixes:
            known = ", ".join(f"{prefix}_loss" for prefix in prefixes)
            raise ValueError(
                f"best.metric: {self.best.metric} is not measured; write one of {known}, or its perplexity or accuracy"
            )
        return self

    def result(self) -> dict[str, Any]:
        """The settings that change the result, defaults resolved; not cadence, place or hardware."""
        result = self.model_dump(
            exclude={
                "name",
                "storage",
                "checkpoint",
                "log_every_steps",
                "max_failures",
                "evaluate",
                "best",
                "takeover",
                "hang_seconds",
                "on_change",
            }
        )
        del (
            result["batch"]["micro_batch"],
            result["recompute_blocks"],
            result["attention"],
            result["compile"],
            result["optim"]["max_skipped_steps"],
        )
        # What came later is left out where it is not set, so that older runs keep their fingerprints.
        if self.lora is None:
            del result["lora"]
        if self.schedule.warmup_ratio is None:
            del result["schedule"]["warmup_ratio"]
        if self.optim.moments == "float32":
            del result["optim"]["moments"]
        if self.best and (self.best.export or self.best.patience):  # then the evaluations decide on the weights
            result["best"] = self.best.model_dump() | {"every_steps": self.evaluate.every_steps}
        result["order_version"] = ORDER_VERSION
        return result

    def fingerprint(self) -> str:
        """Eight hex digits over `result`."""
        return hashlib.sha256(json.dumps(self.result(), sort_keys=True).encode()).hexdigest()[:8]


class Hardware(Settings):
    """What the chart derived from `workers` and the instance catalogue; the trainer reads it, nobody writes it."""

    workers: int = Field(default=1, ge=1)
    """Worker processes: one a GPU, or one a node without GPUs."""

    min_workers: int | None = Field(default=None, ge=1)
    """Fewest workers that the run goes on with while nodes are missing; null means that it waits for all."""

    nodes: int = Field(default=1, ge=1)
    """Worker pods, one a node."""

    cpus_per_worker: int = Field(default=1, ge=1)
    """CPUs that Ray reserves for one worker process, and its number of threads."""

    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs of one node; 0 means training on CPUs."""

    efa_per_node: int = Field(default=0, ge=0)
    """Elastic Fabric Adapter interfaces of one node."""

    efa_required: bool = False
    """Training must fail rather than fall back to TCP."""

    instance_type: str | None = None
    """EC2 instance type of the workers; null means not an EC2 machine of the catalogue."""

    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of one GPU in GiB; null where there is none."""

    autoscaled: bool = False
    """Worker pods start only when the driver asks for them."""

    grace_seconds: int = Field(default=120, ge=30)
    """Seconds between SIGTERM and SIGKILL of a pod."""

    @model_validator(mode="after")
    def _range(self) -> "Hardware":
        if self.min_workers is not None and self.min_workers > self.workers:
            raise ValueError(f"min_workers is {self.min_workers}, more than workers, {self.workers}; write at most that")
        return self


class Release(Settings):
    """Which Helm release a run belongs to."""

    name: str
    """Name of the release."""

    namespace: str
    """Its namespace."""


class RunFile(Settings):
    """run.json: one run, as the chart renders it and `ray-finetune train --run` reads it."""

    trainer: TrainerConfig
    """The settings, as written under `trainer` in values.yaml."""

    hardware: Hardware = Hardware()
    """What the run has to work with."""

    release: Release | None = None
    """Null outside a cluster."""

    @property
    def uri(self) -> str:
        """The run's folder."""
        return f"{self.trainer.storage.uri.rstrip('/')}/{self.trainer.name}-{self.trainer.fingerprint()}"


def load_settings(model: type[S], path: Path, overrides: Iterable[str] = ()) -> S:
    """Reads a JSON or YAML file into `model`, with `a.b=value` overrides; InputError names the file and the key."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give an existing settings file") from None
    try:
        raw = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); mend that line") from None
    except yaml.YAMLError as error:
        line = error.problem_mark.line + 1 if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else 1
        raise InputError(f"{path}:{line}: not valid YAML; mend that line") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid settings ({error}); mend that value") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: holds no settings; write at least name, model and data")
    for text in overrides:
        override(raw, text)
    return parse_settings(model, raw, str(path))


def parse_settings(model: type[S], raw: Any, where: str) -> S:
    """Validates `raw`; the first problem becomes one InputError sentence that names `where` and the key."""
    try:
        return TypeAdapter(model).validate_python(raw)
    except ValidationError as error:
        # A misspelt key is the cause of the missing one that it was meant to be.
        problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        raise InputError(f"{where}: {_sentence(model, problems[0])}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 2e-05 and 1e+06 as text; here they are numbers, as they are in JSON."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def override(raw: dict[str, Any], text: str) -> None:
    """Applies one `a.b=value` to settings not yet validated."""
    key, equals, value = text.partition("=")
    *parents, last = key.split(".")
    if not equals or not all([*parents, last]):
        raise InputError(f"--set {text}: write it as a.b=value")
    for parent in parents:
        raw = raw.setdefault(parent, {})
        if not isinstance(raw, dict):
            raise InputError(f"--set {text}: {parent} is a single value, not a section")
    try:
        raw[last] = parse_yaml(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InputError(f"--set {text}: {value} is no JSON or YAML value; write it as a.b=value") from None


def _sentence(model: type[BaseModel], problem: Any) -> str:
    """One pydantic error in the user's words."""
    location = [str(part) for part in problem["loc"] if part != "[key]"]
    key = ".".join(location) or "settings"
    if problem["type"] == "extra_forbidden":
        siblings = list(_section(model, location[:-1]).model_fields)
        close = difflib.get_close_matches(location[-1], siblings, n=1, cutoff=0.6)
        return f"{key}: unknown setting; " + (f"did you mean {close[0]}?" if close else f"known are {', '.join(siblings)}")
    if problem["type"] == "missing":
        return f"{key}: must be set"
    if problem["type"] == "string_pattern_mismatch":
        named = [part for part in location if not part.isdigit()]  # a list's field stands before the number
        field = _section(model, named[:-1]).model_fields.get(named[-1])
        rule = field.description if field else f"it must match {problem['ctx']['pattern']}"
        return f"{key}: {problem['input']!r} is not allowed; {rule}"
    message = problem["msg"].removeprefix("Value error, ")
    given = "" if isinstance(problem["input"], dict) else f", not {problem['input']!r}"
    return f"{key}: {message[0].lower()}{message[1:]}{given}"


def _section(model: type[BaseModel], path: list[str]) -> type[BaseModel]:
    """The settings class that `path` leads to; numbers of a list and names of a map are on the way, but no fields."""
    for part in path:
        if part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
