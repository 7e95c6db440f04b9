"""Writes charts/ray-finetune/files/instance-types.yaml from instance-types.csv, the facts it was taken from.

python tests/chart/generate_catalogue.py [--check]
"""

import csv
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CATALOGUE = HERE.parents[1] / "charts/ray-finetune/files/instance-types.yaml"
# `source` stays in the CSV: the catalogue is read by templates and by the trainer, not by people who check it.
LEFT_OUT = {"instance_type", "source"}
FLAGS = {"yes": True, "no": False, "unknown": None, "n/a": None}

HEADER = """\
# EC2 instance types with NVIDIA GPUs: generated from tests/chart/instance-types.csv, which names the source of each row.
# alloc_*: what the node leaves to pods before DaemonSets. gpu_mem_gib: usable memory of one GPU. efa: interfaces.
# rdma: GPUDirect RDMA over EFA. efa_rdma_*: RDMA reads and writes over EFA. null: unknown, or no EFA to ask it of.
"""


def value_of(column: str, text: str) -> Any:
    if text in FLAGS:
        return FLAGS[text]
    return text if column == "gpu_model" else int(text)


def catalogue() -> dict[str, dict[str, Any]]:
    with (HERE / "instance-types.csv").open(newline="") as file:
        return {
            row["instance_type"]: {c: value_of(c, t) for c, t in row.items() if c not in LEFT_OUT} for row in csv.DictReader(file)
        }


def render() -> str:
    lines = [
        f"{name}: {yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=10_000).strip()}\n"
        for name, row in catalogue().items()
    ]
    return HEADER + "".join(lines)


def main() -> int:
    text = render()
    if "--check" not in sys.argv:
        CATALOGUE.write_text(text)
        return 0
    if CATALOGUE.read_text() == text:
        return 0
    print(f"{CATALOGUE} is not what instance-types.csv gives; run python tests/chart/generate_catalogue.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
