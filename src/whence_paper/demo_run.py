"""Run the demonstration: trials, a table for the terminal, the report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .demo_classes import GROUPS, OURS, THEIRS, Classes, mean_classes, run_classes
from .demo_page import TITLE, about, cells, ids, names, questions, sections
from .demo_task import SIDE
from .demo_trial import FULL, QUESTIONS, QUICK, SCORES, Size, Trial, mean_auroc, run_trial


def run(
    draws: int = 5,
    seed: int = 0,
    out: str | Path = "report.html",
    quick: bool = False,
    figures: str | Path | None = None,
    console: Console | None = None,
) -> tuple[list[Trial], list[Classes]]:
    """Run some trials with two groups of digits and with ten classes, print the tables, and write the report.

    Args:
        draws: how many trials; the first has `seed`, each next one adds one.
        seed: of the first trial.
        out: the HTML file to write.
        quick: two small trials at most, for a first look.
        figures: folder for the pictures of the first trial as PNG files; none when not given.
        console: where to print.
    """
    console = console or Console()
    start = time.perf_counter()
    size, draws = (QUICK, min(draws, 2)) if quick else (FULL, draws)
    with one_thread():
        steps = track(range(seed, seed + draws), "two groups: train, fit, predict", console=console, transient=True)
        trials = [run_trial(each, size) for each in steps]
        steps = track(range(seed, seed + draws), "ten classes: train, fit, explain", console=console, transient=True)
        classes = [run_classes(each, size) for each in steps]
    console.print(make_table(trials))
    console.print(classes_table(classes))
    console.print(verdicts_table(classes))
    path = write_report(trials, classes, size, out)
    if figures is not None:
        from .demo_figures import draw_figures  # needs matplotlib, which nothing else here does

        draw_figures(trials[0], Path(figures))
    console.print(
        f"{draws} {'draw' if draws == 1 else 'draws'} in {time.perf_counter() - start:.0f} s.", highlight=False
    )
    console.print(f"The digits behind the numbers: {path.resolve()}", highlight=False, soft_wrap=True)
    return trials, classes


def write_report(trials: list[Trial], classes: list[Classes], size: Size, out: str | Path) -> Path:
    """The report of the first trial, with the numbers of all."""
    first = trials[0]
    task = first.task
    return first.tracer.report(
        out,
        (task.test_inputs, task.test_targets),
        names=names(task),
        images=lambda inputs: 1.0 - inputs.reshape(-1, SIDE, SIDE),
        ids=ids(task),
        title=TITLE,
        about=about(trials),
        sections=sections(trials, classes, size),
    )


def make_table(trials: list[Trial]) -> Table:
    """AUROC of each score for the noisy and the missing digit, draw by draw, as in the paper's Table 1."""
    table = Table(
        title="Two groups of digits, squared error: which are uncertain, and why? AUROC of four scores",
        caption="One digit against all others: 1 is perfect, 0.5 is chance.\n"
        "Noisy against missing: 1 says noise, 0 scarcity, 0.5 neither.",
    )
    for name in ("draw", "test digits"):
        table.add_column(name)
    for name in SCORES:
        table.add_column(name, justify="right")
    for number, trial in enumerate(trials, 1):
        for name, question in zip(QUESTIONS, questions(trial.task.noisy, trial.task.missing), strict=True):
            last = name == QUESTIONS[-1]
            head = str(number) if name == QUESTIONS[0] else ""
            table.add_row(head, question, *cells(trial.auroc[name]), end_section=last)
    if len(trials) > 1:
        mean = mean_auroc(trials)
        spoken = ("noisy", "missing", "noisy against missing")
        for name, question in zip(QUESTIONS, spoken, strict=True):
            head = "mean" if name == QUESTIONS[0] else ""
            table.add_row(head, question, *cells(mean[name]), style="bold")
    return table


def classes_table(classes: list[Classes]) -> Table:
    """AUROC of noise, scarcity and source beside what needs no whence, the mean over draws."""
    draws = "one draw" if len(classes) == 1 else f"{len(classes)} draws"
    table = Table(
        title="Ten digits, cross-entropy: the same questions, beside scores without whence",
        caption=f"Mean AUROC of {draws}. kNN, DDU and Mahalanobis work with the network's last features.",
    )
    table.add_column("score")
    for question in ("noisy digit", "missing digit", "noisy against missing"):
        table.add_column(question, justify="right")
    mean = mean_classes(classes)
    for name in (*OURS, *THEIRS):
        numbers = (f"{mean.auroc[question][name]:.2f}" for question in QUESTIONS)
        table.add_row(name, *numbers, end_section=name == OURS[-1])
    return table


def verdicts_table(classes: list[Classes]) -> Table:
    """The share of each verdict, the mean over draws."""
    mean = mean_classes(classes)
    table = Table(
        title="Ten digits: verdicts", caption=f"{mean.accuracy:.0%} of the other digits are predicted rightly."
    )
    table.add_column("test digits")
    for name in mean.verdicts[GROUPS[0]]:
        table.add_column(name, justify="right")
    for group in GROUPS:
        table.add_row(group, *(f"{share:.0%}" for share in mean.verdicts[group].values()))
    return table


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: these matrices are too small to share, and sums come out the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
