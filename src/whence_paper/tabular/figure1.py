"""Figure 1: California's districts on a map; the error as size, HeC3- and Ho-uncertain ones in colour.

An MLP with one hidden layer of 100 units, LayerNorm and ReLU predicts a district's median house value. The table says
what the two kinds of doubt go with: distance to the training districts, and how far values around differ.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence.plots import BLUE, GREY, VERMILLION, quiet
from whence_paper.data import Housing
from whence_paper.experiment import Experiment, Settings
from whence_paper.pictures import new_figure, save
from whence_paper.records import Record, Run
from whence_paper.tables import Table, mean_and_sd, write_tables

from .fitting import KINDS, add_options, by_setting, configuration, fitted, kinds_of, neighbours, trained
from .problems import Problem, housing, of_housing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KILOMETRES = 111.2
"""Of a degree of latitude."""
MEASURES = {
    "districts": 0,
    "mean error, 100,000 $": 3,
    "km to the 20th nearest district": 1,
    "distance to the 20th nearest in the inputs": 2,
    "deviation of the 20 nearest values, 100,000 $": 2,
    "mean value, 100,000 $": 2,
    "of the poorest fifth": 2,
    "of the richest fifth": 2,
    "in the poorest fifth of regions": 2,
    "in the richest fifth of regions": 2,
    "among poor districts only": 3,
    "HeC3 / Ho": 2,
}
"""What is said about each group, and with how many digits. A region is a district's 20 nearest, its income their mean;
among poor districts only: all of them are below the median of California."""


SHARES = (
    "of the poorest fifth",
    "of the richest fifth",
    "in the poorest fifth of regions",
    "in the richest fifth of regions",
    "among poor districts only",
)
"""Also measured among the tenth of the test districts that lies furthest from the training districts in the inputs."""


def options(parser: argparse.ArgumentParser) -> None:
    """Those of tables, with 100 epochs, and the scale of incomes."""
    add_options(parser, epochs=100, structure="exact")
    parser.add_argument("--log-income", action="store_true", help="give the network the logarithm of a median income")


def kilometres(places: Tensor) -> Tensor:
    """(n, 2) longitude and latitude as kilometres east and north, near enough within one state."""
    middle = math.cos(math.radians(36.5))
    return places * torch.tensor([KILOMETRES * middle, KILOMETRES], dtype=places.dtype)


def judge(settings: Settings, seed: int) -> dict[str, Any]:
    """One split of the districts."""
    data = housing(settings)
    problem = of_housing(data, seed, settings.size, log_income=settings.log_income)
    network = trained(problem, settings, seed)
    tracer = fitted(network, problem, settings)
    found = tracer.predict(list(problem.test_inputs.split(1000)))
    error = (found.mean - problem.test_targets).abs().squeeze(1) * problem.unit
    kinds = kinds_of(found, settings.share)
    columns = {"mean error, 100,000 $": error, **measured(data, problem), "HeC3 / Ho": found.ratio}
    groups = {
        name: {
            "districts": int((kinds == kind).sum()),
            **{key: float(column[kinds == kind].mean()) for key, column in columns.items()},
        }
        for kind, name in enumerate(KINDS)
    }
    scarce = columns["distance to the 20th nearest in the inputs"]
    tenth = scarce >= scarce.quantile(0.9)
    return {
        "test_rmse": float(error.square().mean().sqrt()),
        "n": len(problem.inputs),
        "degrees_of_freedom": float(tracer.degrees_of_freedom),
        "newton_change": float(tracer.diagnostics["Newton change"]),
        "groups": groups,
        "scarcest_tenth": {key: float(columns[key][tenth].mean()) for key in SHARES},
        **(_points(data.places[problem.rows], error, kinds) if seed == 0 else {}),
    }


def measured(data: Housing, problem: Problem) -> dict[str, Tensor]:
    """(m,) each: what the data say about the test districts and their regions."""
    near, which = neighbours(kilometres(data.places[problem.rows]), kilometres(data.places[problem.train_rows]))
    values = data.targets[problem.train_rows][which]  # (m, 20)
    incomes = data.inputs[:, 0]
    income, around = incomes[problem.rows], incomes[problem.train_rows][which]  # (m,) and (m, 20)
    fifths, regions = (torch.quantile(one, one.new_tensor([0.2, 0.8])) for one in (income, around.mean(1)))
    return {
        "km to the 20th nearest district": near[:, -1],
        "distance to the 20th nearest in the inputs": neighbours(problem.test_inputs, problem.inputs)[0][:, -1],
        "deviation of the 20 nearest values, 100,000 $": values.std(1),
        "mean value, 100,000 $": data.targets[problem.rows],
        "of the poorest fifth": (income <= fifths[0]).double(),
        "of the richest fifth": (income > fifths[1]).double(),
        "in the poorest fifth of regions": (around.mean(1) <= regions[0]).double(),
        "in the richest fifth of regions": (around.mean(1) > regions[1]).double(),
        "among poor districts only": (around.amax(1) <= incomes.median()).double(),
    }


def _points(places: Tensor, error: Tensor, kinds: Tensor) -> dict[str, Any]:
    """For the map."""
    longitude, latitude = ([round(value, 3) for value in places[:, side].tolist()] for side in (0, 1))
    errors = [round(value, 3) for value in error.tolist()]
    return {"longitude": longitude, "latitude": latitude, "error": errors, "kinds": kinds.tolist()}


def compute(settings: Settings, record: Record) -> None:
    """All splits."""
    for seed in settings.seeds:
        wanted = {**configuration(settings, seed), **({"income": "log"} if settings.log_income else {})}
        record.once(wanted, partial(judge, settings, seed))


def show(settings: Settings, record: Record) -> list[Path]:
    """The map of the first split, and a table of all."""
    tables = []
    for words, runs in by_setting(record.runs()).items():
        table = Table(f"{words}: mean ± sd over splits {_seeds(runs)}", ("test districts", *KINDS, "scarcest tenth"))
        for name, digits in MEASURES.items():
            values = [[run.results["groups"][kind].get(name) for run in runs] for kind in KINDS]
            if None not in values[0]:  # a record may be older than a measure
                table.add(name, *(mean_and_sd(one, digits) for one in values), _scarcest(runs, name, digits))
        tables.append(table)
    each = Table(
        "Every run", ("setting", "split", "error", *(f"{kind}: {name}" for name in LOOKED_AT for kind in KINDS[1:]))
    )
    for words, runs in by_setting(record.runs()).items():
        for run in runs:
            groups = run.results["groups"]
            cells = [f"{groups[kind][name]:.2f}" for name in LOOKED_AT for kind in KINDS[1:]]
            each.add(words, str(run.configuration["seed"]), f"{run.results['test_rmse']:.3f}", *cells)
    written = write_tables(settings.out / f"{record.path.stem}.md", [*tables, each])
    drawn = next((run.results for run in record.runs() if "kinds" in run.results), None)
    if drawn is None:  # the map is of the first split
        return written
    figure = new_figure(6.4, 6.6)
    draw_map(drawn, figure.subplots())
    return [*written, save(figure, settings.out / f"{record.path.stem}.png")]


def draw_map(drawn: dict[str, Any], ax: Axes) -> None:
    """Districts as circles: the area shows the error, the colour the kind."""
    columns = ("longitude", "latitude", "error", "kinds")
    east, north, error, kinds = (torch.tensor(drawn[name]) for name in columns)
    scale = float(error.quantile(0.99))
    styles = [  # plain ones at the back
        (0, "neither", GREY, 0.3, 0.0),
        (2, "Ho-uncertain: few examples nearby", VERMILLION, 0.65, 0.4),
        (1, "HeC3-uncertain: noisy values nearby", BLUE, 0.65, 0.4),
    ]
    for kind, name, colour, opacity, edge in styles:
        here = (kinds == kind).nonzero().squeeze(1)
        here = here[error[here].argsort(descending=True, stable=True)]  # small circles on top of large ones
        style: dict[str, Any] = {"alpha": opacity, "edgecolors": "white", "linewidths": edge}
        ax.scatter(east[here], north[here], areas(error[here], scale), colour, label=name, **style)
    for shown in (float(f"{scale / 8:.1g}"), float(f"{scale:.1g}")):
        size = float(areas(torch.tensor(shown), scale))
        ax.scatter([], [], size, GREY, alpha=0.6, linewidths=0, label=f"error {shown:g}")
    handles, names = ax.get_legend_handles_labels()
    order = (2, 1, 0, 3, 4)
    legend = ax.legend([handles[at] for at in order], [names[at] for at in order], fontsize="small", edgecolor="none")
    for handle in legend.legend_handles[:3]:
        if handle is not None:
            handle.set(sizes=[36.0], alpha=0.9)
    middle = math.radians(float(north.mean()))
    ax.set(xlabel="longitude, °", ylabel="latitude, °", aspect=1.0 / math.cos(middle))
    ax.set_title("Test districts; errors of the median house value in 100,000 $", fontsize="medium")
    quiet(ax)


def areas(errors: Tensor, scale: float) -> Tensor:
    """Areas of circles in points squared, for errors up to `scale`."""
    return 2.0 + 128.0 * (errors / scale).clamp_max(1.0)


def _scarcest(runs: list[Run], name: str, digits: int) -> str:
    """Of the tenth furthest from the training districts in the inputs; nothing where it was not measured."""
    values = [run.results.get("scarcest_tenth", {}).get(name) for run in runs]
    return "" if None in values else mean_and_sd(values, digits)


def _seeds(runs: list[Run]) -> str:
    return ", ".join(str(run.configuration["seed"]) for run in runs)


LOOKED_AT = ("km to the 20th nearest district", "deviation of the 20 nearest values, 100,000 $", "HeC3 / Ho")


def check(settings: Settings, record: Record) -> list[str]:
    """Ho-uncertain districts are far from others; around HeC3-uncertain ones values differ more."""
    groups = [run.results["groups"] for run in record.runs()]
    mean = {name: {kind: fmean(one[kind][name] for one in groups) for kind in KINDS} for name in LOOKED_AT}
    far, differ = (mean[name] for name in LOOKED_AT[:2])
    lost = []
    if not far["Ho-uncertain"] > max(far["HeC3-uncertain"], far["neither"]):
        lost.append(f"Ho-uncertain districts are far from others; kilometres: {_said(far)}")
    if not differ["HeC3-uncertain"] > max(differ["Ho-uncertain"], differ["neither"]):
        lost.append(f"values differ most around HeC3-uncertain districts; deviations: {_said(differ)}")
    return lost


def _said(values: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:.3g}" for kind, value in values.items())


EXPERIMENT = Experiment("figure1", __doc__ or "", compute, show, check, options, runs=(5, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
