"""Draws .github/speed.svg, README's picture, from the tables of the newest benchmarks/h200-*.md.

python tests/bench/picture.py
"""

import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
OURS, THEIRS = "#0969da", "#8c959f"
# By panel: the row of a table by how it begins, and what it is called in the picture.
PANELS = {
    "rows that fill a sequence": {
        "full: ": "ray-finetune",
        "full rows, no gradient checkpointing, Liger": "TRL, its best setting here",
        "full rows, its defaults": "TRL, its defaults",
    },
    "chat rows, mean 600 tokens": {
        "chat: ": "ray-finetune, packed",
        "chat rows packed, Liger": "TRL, its best packing here",
        "chat rows, its defaults": "TRL, its defaults",
    },
}


def speeds(text: str) -> dict[str, int]:
    """Tokens/s by the first column of each table row whose second is such a number."""
    return {name: int(number.replace(",", "")) for name, number in re.findall(r"^\| ([^|]+) \| ([\d,]+) \|", text, re.MULTILINE)}


def draw(found: dict[str, int], date: str) -> Figure:
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, 2, sharex=True), PANELS.items(), strict=True):
        numbers = [next(number for name, number in found.items() if name.startswith(start)) for start in rows]
        bars = axes.barh(list(rows.values()), numbers, color=[OURS, THEIRS, THEIRS], height=0.6)
        axes.bar_label(bars, labels=[f"{number:,}" for number in numbers], padding=4)
        axes.set_title(title, loc="left", fontsize=11)
        axes.invert_yaxis()
        axes.set_xlim(0, 72_000)
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.spines[:].set_visible(False)
    figure.supxlabel(f"tokens/s, full fine-tuning of a 1.5 B model on one H200, {date}", fontsize=9)
    return figure


def main() -> None:
    source = max((ROOT / "benchmarks").glob("h200-*.md"))
    # Without a date and with fixed ids, so that the same table gives the same file.
    with rc_context({"svg.hashsalt": "speed", "svg.fonttype": "path"}):
        figure = draw(speeds(source.read_text()), source.stem.removeprefix("h200-"))
        figure.savefig(ROOT / ".github" / "speed.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
