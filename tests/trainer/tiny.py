"""Small real models, a small real tokenizer and rows to train them on, made on the spot: the tests need no network."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from trainer.config import TrainerConfig

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = [
    "red",
    "blue",
    "green",
    "cold",
    "warm",
    "north",
    "south",
    "river",
    "stone",
    "cloud",
    "apple",
    "seven",
    "three",
    "runs",
    "sleeps",
    "sings",
    "over",
    "under",
    "the",
    "a",
]
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# The shape of Qwen2.5-1.5B, 1.5437 B parameters: what speed is measured on.
QWEN_1P5B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
# That of Qwen2.5-7B, 7.6156 B parameters.
QWEN_7B: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=16, tie_word_embeddings=False),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE, head_dim=8, sliding_window=16, final_logit_softcapping=30.0, layer_types=["sliding_attention", "full_attention"]
    ),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML's special tokens and template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", additional_special_tokens=special[1:])
    fast.chat_template = CHATML
    return fast


def save_model(folder: Path, family: str = "qwen2", seed: int = 0) -> Path:
    """A model folder with float32 random weights and the tokenizer."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    config.dtype = torch.float32
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, seed: int = 0) -> Path:
    """Conversations of one or two turns with answers of many lengths."""
    choose = random.Random(seed)
    lines = []
    for _ in range(count):
        messages = []
        for _ in range(choose.choice([1, 1, 2])):
            messages.append({"role": "user", "content": " ".join(choose.choices(WORDS, k=choose.randint(1, 5)))})
            messages.append({"role": "assistant", "content": " ".join(choose.choices(WORDS, k=choose.randint(1, 9)))})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def settings(folder: Path, family: str = "qwen2", **changes: Any) -> dict[str, Any]:
    """Settings of a run in `folder`, its model and rows made there; sections in `changes` are merged."""
    model = folder / "model"
    if not model.exists():
        save_model(model, family)
        write_rows(folder / "train.jsonl", 40)
        write_rows(folder / "eval.jsonl", 10, seed=1)
    base: dict[str, Any] = {
        "name": "tiny",
        "storage": {"uri": str(folder / "runs")},
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "sequence_length": 128},
        "duration": {"steps": 8},
        "batch": {"sequences": 3},
        "optim": {"lr": 1e-3, "weight_decay": 0.1},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"every_steps": 2},
        "evaluate": {"prompts": 1, "max_new_tokens": 4},
    }
    for key, value in changes.items():
        base[key] = base.get(key, {}) | value if isinstance(value, dict) else value
    return base


def config(folder: Path, family: str = "qwen2", **changes: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(settings(folder, family, **changes))
