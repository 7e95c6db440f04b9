"""`python -m trainer` is `ray-finetune`, also where the console script is not installed."""

from trainer.cli import main

main()
