"""Many studies on one GPU: several processes at a time, until a deadline; all that they leave behind in one file.

    python -m benchmarks.gpu_studies verdicts people --data DIR --device cuda --at-once 4 --deadline 540 --out $OUT

Each study is a command with a record and a log of its own. Those named first start first; none starts that would not
end before the deadline by its usual time, and what still runs then is stopped. After every study `studies.tar.gz` is
written anew under `--out`, with all records and logs so far. The last lines say how each study ended.
`python -m benchmarks.merge_records` makes one record of many. `--tiny` runs the same commands in small.

Processes take turns on a GPU. With `nvidia-cuda-mps-control -d` beforehand they run there at the same time: 25 studies
of verdicts then took 410 s on an H200, where 15 had taken 490 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from .record import say

MEMORY = 110
"""GiB of the GPU that the fits of all processes may take together."""
SHARING = ("benchmarks.verdicts", "benchmarks.people")
"""Modules with an option `--memory`, the share of one process."""


@dataclass(frozen=True)
class Study:
    """A command.

    Attributes:
        name: of its record and its log.
        module: that is run.
        options: on its command line, beside those for data, device and record, which are added.
        usual: seconds that it takes beside others.
        small: options in place of these for a trial.
    """

    name: str
    module: str
    options: tuple[str, ...]
    usual: float
    small: tuple[str, ...] = ()


def verdicts(case: str, seeds: range, usual: float) -> Study:
    """Draws of one case."""
    short = case.replace(", ", "-").replace(" ", "-").lower()
    chosen = tuple(map(str, seeds))
    small = ("--n", "300", "--test", "60", "--epochs", "1", "--structures", "sketch:size=32")
    told = ("--cases", case, "--seeds", *chosen)
    return Study(f"verdicts-{short}-{seeds[0]}", "benchmarks.verdicts", told, usual * len(seeds), (*told, *small))


def people(labels: str, seed: int, folds: int, usual: float) -> Study:
    """One network on the labels of people."""
    told = ("--labels", labels, "--seeds", str(seed), "--folds", str(folds))
    return Study(
        f"people-{labels}-{seed}", "benchmarks.people", told, usual, (*told, "--tiny", "--structure", "sketch:size=32")
    )


def disentanglement(seed: int) -> Study:
    """One run of CIFAR-10; all runs add to the same record."""
    told = ("--cases", "cifar-10", "--seeds", "1", "--first-seed", str(seed))
    return Study(
        f"disentanglement-{seed}",
        "whence_paper.disentanglement.experiment",
        told,
        320,
        (*told, "--size", "100", "--epochs", "1"),
    )


NATURAL = ("cifar-10, ViT", "cifar-10", "cifar-10, squared error")
CLOTHES = ("fashion-mnist, all images", "fashion-mnist, all images, squared error")

STUDIES: dict[str, list[Study]] = {
    "verdicts": [
        *(verdicts(case, range(seed, seed + 1), 150) for case in NATURAL for seed in range(413, 418)),
        *(verdicts(case, range(seed, seed + 1), 60) for case in CLOTHES for seed in range(413, 418)),
    ],
    "people": [
        *(people(labels, seed, 0, 70) for seed in (341, 342, 343) for labels in ("aggregate", "worst")),
        people("aggregate", 344, 5, 300),
        people("worst", 344, 5, 300),
    ],
    "disentanglement": [disentanglement(seed) for seed in range(5)],
    "datamodeling": [
        Study(
            "datamodeling",
            "benchmarks.datamodeling",
            ("--cases", "cifar-2", "--seeds", "300", "--checkpoints", "5", "--dampings", "its own rule"),
            200,
            ("--cases", "cifar-2", "--seeds", "300", "--checkpoints", "2", "--halves", "4", "--tiny"),
        )
    ],
    "labels": [
        Study(
            "label-errors-images",
            "benchmarks.label_errors_images",
            ("--seeds", "200", "201", "202", "203", "204", "--peers"),
            150,
            ("--seeds", "200", "--tiny", "--n", "200", "--epochs", "1", "--structures", "sketch:size=32"),
        )
    ],
}


@dataclass
class Running:
    """A process, and what became of it."""

    study: Study
    process: subprocess.Popen[bytes]
    log: Path
    start: float
    ended: str = ""
    seconds: float = field(default=0.0)

    def last(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def command(study: Study, given: argparse.Namespace) -> list[str]:
    """What is run."""
    record = ("--out", str(given.work / "disentanglement"))
    if study.module.startswith("benchmarks."):
        record = ("--out", str(given.work / f"{study.name}.json"))
    told = study.small if given.tiny else study.options
    if study.module == "benchmarks.verdicts":
        told = (*told, "--ranks", str(given.work / "ranks"))
    if study.module in SHARING:
        told = (*told, "--memory", str(MEMORY // given.at_once))
    return [sys.executable, "-m", study.module, "--data", str(given.data), "--device", given.device, *record, *told]


def start(study: Study, given: argparse.Namespace) -> Running:
    """Begin a study."""
    log = given.work / f"{study.name}.log"
    threads = str(max(1, given.cores // given.at_once))
    around = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as kept:
        process = subprocess.Popen(command(study, given), stdout=kept, stderr=subprocess.STDOUT, env=around)
    return Running(study, process, log, time.perf_counter())


def pack(given: argparse.Namespace) -> None:
    """All records and logs in one file, whole or not at all."""
    given.out.mkdir(parents=True, exist_ok=True)
    partly = given.work.parent / f"{given.work.name}.tar.gz.part"
    with tarfile.open(partly, "w:gz") as archive:
        archive.add(given.work, arcname="studies")
    (given.out / "studies.tar.gz").write_bytes(partly.read_bytes())


def finish(one: Running, word: str, given: argparse.Namespace) -> None:
    """Note how a study ended, and pack what there is."""
    one.ended, one.seconds = word, time.perf_counter() - one.start
    say(f"{one.study.name}: {word} after {one.seconds:.0f} s")
    pack(given)


def run(studies: list[Study], given: argparse.Namespace) -> tuple[list[Running], list[Study]]:
    """Run what there is time for; those that ran, and those that did not start."""
    began = time.perf_counter()
    waiting, done, now = list(studies), [], []
    while waiting or now:
        passed = time.perf_counter() - began
        for one in list(now):
            code = one.process.poll()
            if code is None and passed < given.deadline:
                continue
            if code is None:
                one.process.kill()
                one.process.wait()
            now.remove(one)
            done.append(one)
            finish(one, "stopped" if code is None else "done" if code == 0 else f"failed ({code})", given)
        while len(now) < given.at_once:
            fitting = [study for study in waiting if passed + (0 if given.tiny else study.usual) < given.deadline]
            if not fitting:
                break
            waiting.remove(fitting[0])
            now.append(start(fitting[0], given))
        if not now:
            break
        time.sleep(0.2)
    return done, waiting


def main() -> None:
    """Run the studies that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", help=f"{', '.join(STUDIES)}, or the name of one study of them")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=4, help="processes")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="that they share")
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds from now")
    parser.add_argument("--work", type=Path, default=Path("out/studies"), help="records and logs, as they grow")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where studies.tar.gz goes")
    parser.add_argument("--tiny", action="store_true", help="the same commands in small")
    given = parser.parse_args()
    every = {study.name: study for group in STUDIES.values() for study in group}
    wrong = [name for name in given.studies if name not in STUDIES and name not in every]
    if wrong:
        parser.error(f"expected studies among {', '.join([*STUDIES, *every])}, got {', '.join(wrong)}")
    chosen = [study for name in given.studies for study in STUDIES.get(name, [every[name]] if name in every else [])]
    given.work.mkdir(parents=True, exist_ok=True)
    done, left = run(chosen, given)
    pack(given)
    for one in done:
        say(f"{one.study.name:34} {one.ended:11} {one.seconds:5.0f} s  {one.last()[:120]}")
    for study in left:
        say(f"{study.name:34} not started")


if __name__ == "__main__":
    main()
