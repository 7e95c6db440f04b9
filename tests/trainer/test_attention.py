"""What the CPU works out of a micro-batch for kernels that know no masks, and which attention a model gets."""

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig, Qwen2Config

from trainer.attention import choose_attention, document_bounds
from trainer.config import TrainerConfig
from trainer.loss import MULTIPLE, Targets, chunk_size

CPU = torch.device("cpu")


def test_documents_end_where_rows_end_and_are_filled_up_with_empty_ones() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]])
    bounds = document_bounds(positions, torch.ones(2, 6))
    assert bounds[:6].tolist() == [0, 3, 5, 6, 10, 12]
    assert len(bounds) == 65 and set(bounds[5:].tolist()) == {12}


def test_sequences_of_one_learnt_document_each_are_whole_with_their_padding() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    weights = torch.ones(2, 6)
    weights[0, 3:] = weights[1, 4:] = 0
    assert document_bounds(positions, weights).tolist() == [0, 6, 12]


def test_targets_are_the_weighted_tokens_filled_up_with_some_that_weigh_nothing() -> None:
    labels = torch.arange(200).view(2, 100)
    weights = torch.zeros(2, 100)
    weights[0, 5], weights[1, 7] = 0.5, 2.0
    targets = Targets.of(labels, weights)
    assert targets.index[:2].tolist() == targets.labels[:2].tolist() == [5, 107]
    assert targets.weights.tolist() == [0.5, 2.0, *[0.0] * (MULTIPLE - 2)]
    assert len(Targets.of(labels, torch.zeros(2, 100)).index) == MULTIPLE


@pytest.mark.parametrize("count", [64, 1024, 1088, 4096, 5056])
def test_chunks_are_alike_and_cover_all(count: int) -> None:
    size = chunk_size(count, 50000, CPU)
    assert size % MULTIPLE == 0 and size <= 1024
    assert (-(-count // size) - 1) * size < count <= -(-count // size) * size


def test_attention_is_plain_on_a_cpu_and_eager_where_scores_are_capped_or_have_sinks() -> None:
    config = TrainerConfig.model_validate({"name": "a", "model": {"path": "-"}, "data": {"train": "-"}})
    chosen = [choose_attention(base, config, CPU, torch.float32) for base in (Qwen2Config(), Gemma2Config(), GptOssConfig())]
    assert chosen == ["sdpa", "eager", "eager"]
    other = config.model_copy(update={"attention": "flash_attention_2"})
    assert choose_attention(Gemma2Config(), other, CPU, torch.float32) == "flash_attention_2"
