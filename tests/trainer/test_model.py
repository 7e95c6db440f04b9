"""Models of all supported families: the loss is the model's own, and the export loads in plain transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from safetensors.torch import load_file
from tiny import CHATML, FAMILIES, save_model, settings
from training import run_training
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.config import InputError, TrainerConfig
from trainer.loss import Targets
from trainer.model import build_model, fetch_model, load_pretrained, load_tokenizer, plain_logits, supervised_loss
from trainer.parallel import materialize

LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    out = model(torch.arange(3, 40).unsqueeze(0)).logits
print(json.dumps({"missing": sorted(info["missing_keys"]), "unexpected": sorted(info["unexpected_keys"]), "logits": out[0, -1].tolist()}))
"""


def plain(folder: Path, values: dict[str, Any]) -> Any:
    """The model outside any process group, its weights loaded."""
    model = build_model(folder, TrainerConfig.model_validate(values), "sdpa")
    materialize(model, torch.device("cpu"))
    model.tie_weights()
    load_pretrained(model, folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chunked_loss_is_the_models_own(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.loss.MULTIPLE", 4)
    monkeypatch.setattr("trainer.loss.CPU_CHUNK", 5)
    values = settings(tmp_path, family)
    ours = plain(tmp_path / "model", values)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.randint(3, 300, (2, 33))
    labels = torch.where(torch.rand(2, 33) < 0.4, ids, -100)
    shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], dim=1)
    mine = supervised_loss(ours, ids, torch.arange(33).expand(2, -1), Targets.of(shifted, (shifted != -100).float()))
    mine.backward()
    reference = theirs(input_ids=ids, labels=labels).loss * (labels[:, 1:] != -100).sum()
    reference.backward()
    assert mine.item() == pytest.approx(reference.item(), rel=1e-5)
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5), name


def test_a_batch_without_labels_reaches_every_parameter(tmp_path: Path) -> None:
    model = plain(tmp_path / "model", settings(tmp_path))
    ids = torch.randint(3, 300, (1, 8))
    nothing = Targets.of(torch.full((1, 8), -100), torch.zeros(1, 8))
    supervised_loss(model, ids, torch.arange(8).unsqueeze(0), nothing).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_loads_in_a_fresh_process_with_the_same_logits(tmp_path: Path, family: str) -> None:
    values = settings(tmp_path, family, optim={"lr": 1e-6}, duration={"steps": 1})
    [result, _] = run_processes(2, run_training, values)
    exported, base = Path(result["uri"], "model"), tmp_path / "model"
    loaded = json.loads(subprocess.run([sys.executable, "-c", LOAD, exported], check=True, capture_output=True).stdout)
    assert loaded["missing"] == loaded["unexpected"] == []
    tensors, before = load_file(exported / "model.safetensors"), load_file(base / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {name: (t.shape, t.dtype) for name, t in before.items()}
    assert any(not torch.equal(tensors[name], before[name]) for name in tensors)
    model = plain(exported, values)
    with torch.no_grad():
        ours = plain_logits(model, torch.arange(3, 40).unsqueeze(0))
        assert torch.allclose(ours[0, -1], torch.tensor(loaded["logits"]), atol=1e-6)


def test_the_exported_generation_config_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    [result] = run_processes(1, run_training, settings(tmp_path, duration={"steps": 1}))
    exported = Path(result["uri"], "model")
    generation = json.loads((exported / "generation_config.json").read_text())
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in generation["eos_token_id"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert generation["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_added_tokens_grow_the_embeddings_and_are_exported_with_the_template(tmp_path: Path, family: str) -> None:
    added = [f"<|extra_{i}|>" for i in range(30)]  # 300 tokens and these are more than the model's 320 rows
    values = settings(tmp_path, family, duration={"steps": 1}, optim={"lr": 1e-9})
    values["model"]["added_tokens"] = added
    values["data"]["chat_template"] = CHATML.replace("<|im_end|>", "<|extra_7|>")
    [result, _] = run_processes(2, run_training, values)
    exported = Path(result["uri"], "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.chat_template == values["data"]["chat_template"]
    assert tokenizer.eos_token == "<|extra_7|>"
    loaded: Any = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    model, facts = loaded
    assert not facts["missing_keys"] and not facts["mismatched_keys"]
    before = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    grown = model.get_input_embeddings().weight
    assert grown.shape == (384, 32) == model.get_output_embeddings().weight.shape
    assert torch.allclose(grown[:320], before, atol=1e-6)
    assert torch.allclose(grown[320:], before.mean(0).expand(64, -1), atol=1e-6)


def test_a_config_with_more_rows_than_the_weights_have_is_refused_where_no_tokens_are_added(tmp_path: Path) -> None:
    values = settings(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 384}))
    with pytest.raises(InputError, match=r"has shape \[320, 32\], but config\.json says \[384, 32\]"):
        plain(tmp_path / "model", values)


def test_frozen_parameters_keep_their_values_and_others_learn(tmp_path: Path) -> None:
    values = settings(tmp_path, duration={"steps": 2})
    values["model"]["freeze"] = ["model.layers.0.*", "model.embed_tokens.weight"]
    [result, _] = run_processes(2, run_training, values)
    after, before = (
        load_file(Path(result["uri"], "model", "model.safetensors")),
        load_file(tmp_path / "model" / "model.safetensors"),
    )
    frozen = {name for name in after if torch.equal(after[name], before[name])}
    assert frozen == {name for name in after if name.startswith("model.layers.0.") or name == "model.embed_tokens.weight"}


def test_sharded_weights_split_over_several_files_are_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    whole = load_file(folder / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    model = plain(folder, settings(tmp_path))
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert all(torch.equal(parameter, whole[name]) for name, parameter in model.named_parameters())


def test_a_pattern_that_freezes_nothing_is_refused(tmp_path: Path) -> None:
    values = settings(tmp_path)
    values["model"]["freeze"] = ["model.layer.0.*"]
    with pytest.raises(InputError, match=r"model\.freeze: no parameter is named like model\.layer\.0\.\*"):
        build_model(tmp_path / "model", TrainerConfig.model_validate(values), "sdpa")


def test_a_ggufs_special_tokens_keep_their_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf import GGUFWriter, TokenType
    from tiny import build_tokenizer
    from tokenizers import Tokenizer

    made: Any = build_tokenizer()
    vocabulary = sorted(made.get_vocab(), key=made.get_vocab().get)
    merges = [" ".join(pair) for pair in json.loads(Tokenizer.to_str(made.backend_tokenizer))["model"]["merges"]]
    writer = GGUFWriter(tmp_path / "tiny.gguf", "qwen2")
    facts: list[tuple[Any, Any]] = [
        (writer.add_block_count, 1),
        (writer.add_context_length, 512),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_vocab_size, len(vocabulary)),
    ]
    for add, value in facts:
        add(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary)
    writer.add_token_merges(merges)
    writer.add_token_types([TokenType.CONTROL if token.startswith("<|") else TokenType.NORMAL for token in vocabulary])
    writer.add_bos_token_id(vocabulary.index("<|im_start|>"))
    writer.add_eos_token_id(vocabulary.index("<|im_end|>"))
    writer.add_chat_template(CHATML)
    shapes = {"token_embd": (len(vocabulary), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_output": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    for name, width in (("q", 32), ("k", 16), ("v", 16)):
        writer.add_tensor(f"blk.0.attn_{name}.bias", torch.randn(width).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setenv("RAY_FINETUNE_CACHE", str(tmp_path / "cache"))
    values = settings(tmp_path)
    values["model"] = {"path": str(tmp_path), "gguf_file": "tiny.gguf"}
    config = TrainerConfig.model_validate(values)
    tokenizer: Any = load_tokenizer(fetch_model(config, weights=True), config)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
