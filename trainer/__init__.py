"""ray-finetune's trainer: fine-tunes a Hugging Face causal language model with PyTorch FSDP2 under Ray Train."""

__version__ = "0.1.0"
