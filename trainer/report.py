"""report.html: one self-contained page with a run's settings, loss, speed and samples."""

import io
from typing import Any

import jinja2

from trainer.config import RunFile
from trainer.metrics import read_rows
from trainer.progress import clock, question_of
from trainer.storage import Storage


def write_report(run: RunFile, storage: Storage) -> None:
    """Draws report.html from metrics.jsonl as it stands, also for a run that was interrupted."""
    rows = read_rows(storage)
    environment = jinja2.Environment(loader=jinja2.PackageLoader("trainer", "."), autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.get_template("report.html.j2").render(
        title=f"{run.trainer.name} · {run.trainer.model.path}",
        uri=run.uri,
        figures=_figures(rows),
        plot=_plot(rows),
        samples=_samples(rows),
        settings=list(_flatten(run.model_dump(mode="json"))),
    )
    storage.write("report.html", page.encode())


def _figures(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    steps = [row for row in rows if "loss" in row]
    measured = [row for row in rows if "eval_loss" in row]
    figures = []
    if measured:
        figures += [
            ("held-out loss before", f"{measured[0]['eval_loss']:.3f}"),
            ("held-out loss last", f"{measured[-1]['eval_loss']:.3f}"),
            ("perplexity last", f"{measured[-1]['eval_perplexity']:,.2f}"),
            ("tokens right last", f"{measured[-1]['eval_accuracy']:.1%}"),
        ]
    if chosen := [row for row in rows if "exported_step" in row]:
        best = chosen[-1]["best"]
        figures.append(
            ("exported", f"step {chosen[-1]['exported_step']}; best {best['metric']} {best['value']:.4g} at step {best['step']}")
        )
    if skipped := [row["skipped_steps"] for row in rows if "skipped_steps" in row]:
        figures.append(("steps left out", str(max(skipped))))
    if steps:
        speeds = sorted(row["tokens_per_second"] for row in steps)
        figures += [
            ("steps", f"{steps[-1]['step']} of {steps[-1]['num_steps']}"),
            ("tokens/s, median", f"{speeds[len(speeds) // 2]:,.0f}"),
        ]
        shares = sorted(row["mfu"] for row in steps if row["mfu"])
        if shares:
            figures.append(("MFU, median", f"{shares[len(shares) // 2]:.1%}"))
        if steps[-1]["seconds_left"]:
            figures.append(("time left", clock(steps[-1]["seconds_left"])))
    return figures


def _samples(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    asked = [row["samples"] for row in rows if row.get("samples")]
    if not asked:
        return []
    after = {question_of(sample): sample["answer"] for sample in asked[-1]} if len(asked) > 1 else {}
    return [
        {
            "prompt": question_of(sample),
            "before": sample["answer"],
            "after": after.get(question_of(sample), ""),
            "reference": sample["reference"],
        }
        for sample in asked[0]
    ]


def _plot(rows: list[dict[str, Any]]) -> str:
    """The two curves as SVG that says nothing of its own styles, made safe for a page."""
    from markupsafe import Markup
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    steps = [row for row in rows if "loss" in row]
    measured = [row for row in rows if "eval_loss" in row]
    loss.plot([row["step"] for row in steps], [row["loss"] for row in steps], color="#0969da", linewidth=1.4, label="training")
    loss.plot([row["step"] for row in measured], [row["eval_loss"] for row in measured], "o-", color="#cf222e", label="held-out")
    loss.set(xlabel="step", ylabel="loss per supervised token")
    loss.legend(frameon=False)
    speed.plot([row["step"] for row in steps], [row["tokens_per_second"] for row in steps], color="#1a7f37", linewidth=1.4)
    speed.set(xlabel="step", ylabel="tokens/s")
    speed.set_ylim(bottom=0)
    for axes in (loss, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return Markup(text.getvalue()[text.getvalue().index("<svg") :])


def _flatten(settings: dict[str, Any], prefix: str = "") -> Any:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            yield f"{prefix}{key}", value
