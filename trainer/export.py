"""What a run leaves in `model/`: the model as transformers reads it, or its adapters as peft does, and the tokenizer."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, GenerationConfig

from trainer.config import TrainerConfig
from trainer.lora import adapter_weights, adapters, merged, write_adapters
from trainer.model import as_list, load_tokenizer
from trainer.parallel import World, full
from trainer.storage import Storage

EXPORT_SHARD = 4 * 2**30  # bytes in one safetensors file


def export(model: Any, folder: Path, config: TrainerConfig, storage: Storage, end_of_turn: int | None, world: World) -> None:
    """Writes `model/` of the run: the model, or with `lora` its adapters; generation config and tokenizer. A collective."""
    base = AutoConfig.from_pretrained(folder)
    base.get_text_config().vocab_size = model.config.get_text_config().vocab_size
    with tempfile.TemporaryDirectory() as scratch:
        if config.lora and not config.lora.merge:
            weights = {name: full(weight) for name, weight in adapter_weights(model).items()}
            if world.is_main:
                write_adapters(weights, config.lora, config.model, Path(scratch))
        else:
            _export_model(model, base, folder, storage, world, Path(scratch))
        if world.is_main:
            _write_tokenizer(Path(scratch), base, folder, load_tokenizer(folder, config), end_of_turn)
            for file in Path(scratch).iterdir():
                storage.upload(file, f"model/{file.name}")


def _export_model(model: Any, base: Any, folder: Path, storage: Storage, world: World, scratch: Path) -> None:
    """Uploads safetensors in the base model's type, and leaves their index and config.json in `scratch`.

    One file's tensors at a time are gathered, and rank 0 alone writes. A tied head is left out, as transformers itself
    leaves it out.
    """
    dtype = base.dtype = base.dtype if isinstance(base.dtype, torch.dtype) else _stored_type(folder)
    files, adapted = _split(model, dtype), {f"{name}.weight": layer for name, layer in adapters(model).items()}
    for name, tensors in files.items():
        world.alive()
        whole = {key: (merged(adapted[key]) if key in adapted else full(tensor)).to(dtype) for key, tensor in tensors.items()}
        if world.is_main:
            save_file({key: tensor.cpu().contiguous() for key, tensor in whole.items()}, scratch / name, {"format": "pt"})
            storage.upload(scratch / name, f"model/{name}")
            (scratch / name).unlink(missing_ok=True)
    if world.is_main:
        base.save_pretrained(scratch)
        if len(files) > 1:
            index = {key: name for name, tensors in files.items() for key in tensors}
            size = sum(tensor.numel() * dtype.itemsize for tensors in files.values() for tensor in tensors.values())
            text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1)
            (scratch / "model.safetensors.index.json").write_text(text)


def _stored_type(folder: Path) -> torch.dtype:
    """Type of the base model's first tensor, where its config.json does not say."""
    with safe_open(min(folder.glob("*.safetensors")), framework="pt") as weights:
        return weights.get_tensor(min(weights.keys())).dtype


def _split(model: nn.Module, dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = EXPORT_SHARD
    stored = model.state_dict().keys() - adapter_weights(model).keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in stored:
            continue
        size = tensor.numel() * dtype.itemsize
        if size > room and parts[-1]:
            parts.append({})
            room = EXPORT_SHARD
        parts[-1][name] = tensor
        room -= size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}


def _write_tokenizer(target: Path, base: Any, folder: Path, tokenizer: Any, end_of_turn: int | None) -> None:
    """Tokenizer and generation config, which say how a turn ends."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:
        generation = GenerationConfig.from_model_config(base)
    # Padding needs a token of its own name, not a new one; with the end of a text, it is not what ends a turn.
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    # A base model stops only at the end of a text; the tuned one has learnt to end its turn.
    if end_of_turn is not None:
        stop = as_list(generation.eos_token_id)
        if end_of_turn not in stop:
            generation.eos_token_id = [end_of_turn, *stop]
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_of_turn)
    if not generation.do_sample and (generation.temperature, generation.top_p, generation.top_k) != (None, None, None):
        generation.do_sample = True  # settings for sampling say that it is meant; transformers refuses to save them otherwise
    generation.save_pretrained(target)
    tokenizer.save_pretrained(target)
