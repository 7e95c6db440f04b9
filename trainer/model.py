"""The model: where its files come from, its skeleton on the meta device, its weights and its loss."""

import contextlib
import fnmatch
import importlib.util
import json
import os
import shutil
import types
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.attention import VARLEN, choose_attention, document_bounds
from trainer.config import InputError, ModelConfig, TrainerConfig, refusing
from trainer.lora import add_adapters, base_weights
from trainer.loss import LogitScale, Targets, scores, weighted_loss
from trainer.packing import MicroBatch
from trainer.parallel import free_gathered, own_rows
from trainer.storage import Storage, open_storage

GGUF_VERSION = 2  # raised whenever the same GGUF would give another folder
WEIGHTS = (".safetensors", ".bin", ".gguf")


def quiet_transformers() -> None:
    """Without its bars and remarks, which the run's own lines would drown in."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def cache_folder() -> Path:
    """Where models are kept between runs: RAY_FINETUNE_CACHE, or the user's cache."""
    return Path(os.environ.get("RAY_FINETUNE_CACHE", "~/.cache/ray-finetune")).expanduser()


def fetch_model(config: TrainerConfig, weights: bool, revision: str | None = None) -> Path:
    """A local folder with the base model, with or without its weights; InputError says what it lacks.

    `revision`, the commit that the run began with, goes before the settings' own.
    """
    model = config.model
    if model.path.startswith("s3://"):
        with refusing(f"model.path: {model.path} cannot be read", "give a folder that this run's credentials may read"):
            folder = _download(model.path, open_storage(model.path, config.storage), weights)
    elif Path(model.path).expanduser().is_dir():
        folder = Path(model.path).expanduser()
        check_weights(model.path, [file.name for file in folder.iterdir()])
    elif model.path.startswith((".", "/", "~")) or model.path.count("/") != 1:
        raise InputError(f"model.path: {model.path} is no folder; give an existing one, an s3:// folder or a Hub id")
    else:
        folder = _from_hub(model, weights, revision or model.revision)
    if model.gguf_file:
        return _from_gguf(folder, model.gguf_file)
    if not (folder / "config.json").is_file():
        raise InputError(f"model.path: {model.path} holds no config.json; give the folder of a transformers model")
    return folder


def _download(uri: str, storage: Storage, weights: bool) -> Path:
    keys = storage.list()
    if not keys:
        raise InputError(f"model.path: {uri} is empty; give a folder that holds a transformers model")
    check_weights(uri, list(keys))
    folder = cache_folder() / "models" / sha256(json.dumps([uri, sorted(keys.items())]).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        for key, size in keys.items():
            target = folder / key
            complete = target.is_file() and target.stat().st_size == size
            if not complete and (weights or not key.endswith(WEIGHTS)):
                storage.download(key, target)
    return folder


def _from_hub(model: ModelConfig, weights: bool, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    wanted = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if weights else [])]
    if model.gguf_file:
        wanted = [model.gguf_file]
    try:
        return Path(snapshot_download(model.path, revision=revision, allow_patterns=wanted))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise InputError(f"model.path: the Hub has no {model.path} at {revision or 'main'}; check both, and HF_TOKEN") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise InputError(
            f"model.path: {model.path} is no local folder, and the Hub did not give it; check the path and the network"
        ) from None


def check_weights(path: str, names: list[str]) -> None:
    """InputError where a model folder's file names hold no weights that can be read."""
    if not any(name.endswith((".safetensors", ".gguf")) for name in names):
        raise InputError(f"model.path: {path} holds no *.safetensors weights; give a folder that does, or set model.gguf_file")


def _from_gguf(folder: Path, name: str) -> Path:
    """Dequantises a GGUF into a safetensors folder in the cache, once: transformers holds it whole to read it."""
    source = folder / name
    if not source.is_file():
        raise InputError(f"model.gguf_file: {source} does not exist; name a file in model.path")
    stat = source.stat()
    facts = f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns} {GGUF_VERSION}"
    target = cache_folder() / "models" / sha256(facts.encode()).hexdigest()[:16]
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            print(f"converting {name} to safetensors, once", flush=True)
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            with refusing(f"model.gguf_file: {source} cannot be read", "give a GGUF of a causal language model"):
                model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
                model.save_pretrained(partial)
                tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
                _name_special_tokens(tokenizer, source)
                tokenizer.save_pretrained(partial)
            partial.rename(target)
    return target


def _name_special_tokens(tokenizer: Any, source: Path) -> None:
    """Gives a tokenizer the roles that its GGUF says: transformers 5.13 takes the begin of a text for its end."""
    from gguf import GGUFReader

    fields = GGUFReader(source).fields
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(int(field.parts[-1][0])) if field else None)


def load_tokenizer(folder: Path, config: TrainerConfig) -> Any:
    """The tokenizer of a model folder, with the run's chat template and added tokens; InputError where it cannot be used."""
    with refusing(f"model.path: {folder} has no tokenizer that can be read", "give a complete model folder"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) < 2:
        raise InputError(f"model.path: {folder} has no tokenizer; give a complete model folder")
    if not tokenizer.is_fast:
        raise InputError(f"model.path: {folder} has a tokenizer without tokenizer.json; give one that transformers calls fast")
    if template := config.data.chat_template:
        tokenizer.chat_template = _template_text(template, config)
    if known := [token for token in config.model.added_tokens if token in tokenizer.get_vocab()]:
        raise InputError(f"model.added_tokens: the tokenizer has {known[0]} already; remove it from the list")
    tokenizer.add_tokens(config.model.added_tokens, special_tokens=True)
    return tokenizer


def _template_text(template: str, config: TrainerConfig) -> str:
    """A chat template as it is written, or from the file that is named; InputError where it is no template."""
    import jinja2

    if "{" not in template:
        folder, _, name = template.rpartition("/")
        with refusing(f"data.chat_template: {template} cannot be read", "give a file with a Jinja template, or its text"):
            template = open_storage(folder or ".", config.storage).read(name).decode()
    try:
        render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"data.chat_template: line {error.lineno}: {error.message}; mend that line") from None
    except Exception:  # whether it can render a row is told row by row
        return template
    return template


def check_model(folder: Path, tokenizer: Any, config: TrainerConfig) -> None:
    """InputError where the model cannot be built, or its tokenizer, length or local weights do not belong to it."""
    with refusing(
        f"model.path: {folder} is no causal language model that can be trained", "give another model, or mend its config.json"
    ):
        # The head, where this runs, has no GPU for another kernel.
        attention = choose_attention(AutoConfig.from_pretrained(folder), config, torch.device("cpu"), torch.float32)
        model = build_model(folder, config, attention if config.attention == "auto" else "sdpa")
    if config.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise InputError("attention: flash_attention_2 needs the package flash-attn, which is not installed; set auto or sdpa")
    shape = model.config.get_text_config()
    if len(tokenizer) > shape.vocab_size:  # added tokens have grown it already
        sizes = f"the tokenizer has {len(tokenizer)} tokens, the model {shape.vocab_size}"
        raise InputError(f"model.path: {sizes}; give a tokenizer that belongs to it")
    if (longest := getattr(shape, "max_position_embeddings", None)) and config.data.sequence_length > longest:
        raise InputError(
            f"data.sequence_length: {config.data.sequence_length} is more than the model's {longest} positions; lower it"
        )
    if any(folder.glob("*.safetensors")):
        weight_files(model, folder)


def build_model(folder: Path, config: TrainerConfig, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model without weights: float32 parameters on the meta device, real buffers, frozen parameters marked.

    With adapters, all other parameters are of type `dtype`, in which the model computes.
    """
    from accelerate import init_empty_weights

    shape = AutoConfig.from_pretrained(folder)
    before = shape.get_text_config().vocab_size
    if config.model.added_tokens and (needed := len(load_tokenizer(folder, config))) > before:
        shape.get_text_config().vocab_size = -(-needed // 64) * 64  # a round number keeps the head's product fast
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation=attention)
    model.tie_weights()
    model.is_compiled = False
    model.grown = _per_token(model, before) if shape.get_text_config().vocab_size > before else {}
    for method in (supervised_loss, supervised_scores, plain_logits):
        setattr(model, method.__name__, types.MethodType(method, model))
    for pattern in config.model.freeze:
        names = fnmatch.filter((name for name, _ in model.named_parameters()), pattern)
        if not names:
            raise InputError(
                f"model.freeze: no parameter is named like {pattern}; names look like {next(model.named_parameters())[0]}"
            )
        for name in names:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model.freeze: every parameter is frozen, so nothing would train; narrow the patterns")
    if config.lora:
        add_adapters(model, config.lora, dtype)
    return model


def _per_token(model: Any, size: int) -> dict[str, int]:
    """Names of the parameters with one row a token, each with the number of rows that the base model has."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    own = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return {name: size for name, parameter in model.named_parameters() if id(parameter) in own}


def load_pretrained(model: Any, folder: Path, frozen_only: bool = False) -> int:
    """Copies the base model's weights into this rank's shards, reading from disk only the rows that it owns.

    Returns a checksum of the rows that are frozen; its sum over all ranks modulo 2**40 is the same at any number of them.
    """
    wanted = {name: weight for name, weight in base_weights(model).items() if not (frozen_only and weight.requires_grad)}
    checksum = 0
    for file in sorted(set(weight_files(model, folder).values())) if wanted else []:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys() & wanted.keys():
                rows = _copy_rows(wanted[name], weights.get_slice(name))
                checksum += 0 if wanted[name].requires_grad else _sum_of_bits(rows)
    return checksum


def weight_files(model: Any, folder: Path) -> dict[str, Path]:
    """The safetensors file of each parameter, from the files' headers; InputError where one is missing or of another shape."""
    where: dict[str, Path] = {}
    parameters = base_weights(model)
    for file in sorted(folder.glob("*.safetensors")):
        with refusing(f"model.path: {file} is damaged", "fetch it again"), safe_open(file, framework="pt") as weights:
            for name in sorted(weights.keys() & parameters.keys()):
                where[name] = file
                shape, wanted = list(weights.get_slice(name).get_shape()), list(parameters[name].shape)
                if name in model.grown:  # rows for added tokens, which the file lacks
                    wanted[0] = model.grown[name]
                if shape != wanted:
                    raise InputError(
                        f"model.path: {name} has shape {shape}, but config.json says {wanted}; give files that belong together"
                    )
    missing = sorted(set(parameters) - set(where))
    if missing:
        raise InputError(
            f"model.path: {folder} lacks the weights {', '.join(missing[:3])} ({len(missing)} in all); give a complete model"
        )
    return where


def _copy_rows(parameter: torch.Tensor, source: Any) -> torch.Tensor:
    """Fills this rank's rows of `parameter`; rows that `source` lacks, those of added tokens, get the mean of its own.

    Returns the rows that it has read.

    At the mean a new token is as likely as an average one, so that the loss does not jump (Hewitt 2021, "Initializing
    New Word Embeddings for Pretrained Language Models").
    """
    target, first = own_rows(parameter)
    present = max(0, min(len(target), source.get_shape()[0] - first))
    rows = source[first : first + present] if present else torch.empty(0)
    target[:present].copy_(rows)
    if present < len(target):
        target[present:] = source[:].float().mean(0).to(target)
    return rows


def _sum_of_bits(rows: torch.Tensor) -> int:
    """Of all numbers, as integers of their own width."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(rows.view(integers[rows.element_size()]).sum(dtype=torch.int64))


def loss_inputs(model: Any, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """What `supervised_loss` takes, on its way to `device`; all that depends on the rows' lengths is counted here, on the CPU."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    targets = Targets.of(batch.labels, batch.weights)
    inputs = {
        "input_ids": move(batch.input_ids),
        "position_ids": move(batch.position_ids),
        "targets": Targets(move(targets.index), move(targets.labels), move(targets.weights)),
    }
    if model.config._attn_implementation == VARLEN:
        inputs["document_bounds"] = bounds = move(document_bounds(batch.position_ids, batch.weights))
        torch._dynamo.mark_dynamic(bounds, 0)  # compiled once for any number of documents
    return inputs


def supervised_loss(
    model: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    targets: Targets,
    document_bounds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum of the cross entropies of the supervised tokens; a method of the model, so that FSDP gathers for it."""
    return weighted_loss(model, _hidden_states(model, input_ids, position_ids, document_bounds), targets)


def supervised_scores(
    model: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    targets: Targets,
    document_bounds: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [2]: sum of the supervised tokens' cross entropies, unweighted, and how many of them are the likeliest."""
    return scores(model, _hidden_states(model, input_ids, position_ids, document_bounds), targets)


def _hidden_states(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, document_bounds: torch.Tensor | None
) -> torch.Tensor:
    """The last hidden states of packed rows, which are kept apart by whatever the model's attention needs for it."""
    documents: dict[str, Any] = {}
    if model.config._attn_implementation.startswith("flash"):
        # transformers tells flash attention of packed rows in a batch of one only; positions start at 0, so one row is exact.
        input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    elif document_bounds is not None:
        documents = {"document_bounds": document_bounds, "longest_document": input_ids.shape[1]}
    return model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **documents).last_hidden_state


def plain_logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits as supervised_loss makes them; a method of the model as well."""
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return LogitScale.of(model.config.get_text_config()).apply(model.get_output_embeddings()(hidden))


@contextlib.contextmanager
def as_published(model: Any) -> Iterator[None]:
    """The model's own forward pass inside: not compiled, and with an attention that can generate."""
    kernel = model.config._attn_implementation
    if kernel == VARLEN:
        model.set_attn_implementation("sdpa")
    with torch.compiler.set_stance("force_eager") if model.is_compiled else contextlib.nullcontext():
        yield
    if kernel == VARLEN:
        model.set_attn_implementation(kernel)


@torch.no_grad()
def check_head(model: Any, device: torch.device) -> None:
    """InputError where `plain_logits` is not what the model's own forward gives: the loss would be of another model."""
    ids = torch.arange(1, 9, device=device).unsqueeze(0)
    with as_published(model):
        own, ours = model(input_ids=ids, use_cache=False).logits, model.plain_logits(ids)
    free_gathered(model)
    if not own.isfinite().all():
        raise InputError("model.path: the base model's logits are not finite, so its weights are damaged; fetch them again")
    if not torch.allclose(own, ours, rtol=1e-2, atol=1e-2):
        kind = model.config.model_type
        raise InputError(f"model.path: {kind} models change their logits in a way that is not supported; use another family")


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, sample: dict[str, Any], max_new_tokens: int, end_of_turn: int | None, device: torch.device
) -> str:
    """The model's greedy answer to a sample's messages or prompt. A collective: every rank gives the same arguments."""
    if "messages" in sample:
        asked = {"tools": sample.get("tools"), "add_generation_prompt": True} | sample.get("options", {})
        inputs = tokenizer.apply_chat_template(sample["messages"], return_tensors="pt", return_dict=True, **asked)
    else:
        inputs = tokenizer(sample["prompt"], return_tensors="pt")
    ids = inputs["input_ids"].to(device)
    stop = [*as_list(model.generation_config.eos_token_id), *as_list(tokenizer.eos_token_id), *as_list(end_of_turn)]
    pad = stop[0] if stop else 0
    with as_published(model):
        output = model.generate(input_ids=ids, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stop, pad_token_id=pad)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()


def as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else value
