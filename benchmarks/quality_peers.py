"""Quality beside the peers: the same networks, the same data, one run.

    python -m benchmarks.quality_peers --data DIR --out results/quality_peers.json

UCI regression sets (published splits): negative log-likelihood, calibration, coverage and width of 95 % intervals.
MNIST and Fashion-MNIST: AUROC for misclassified, noisy, missing and out-of-distribution points, negative log-likelihood
and calibration error of the probabilities. Settings were chosen on splits and draws that are not published. Without
data: the diabetes table and the digits that come with scikit-learn. Who is best at what is printed at the end, and
which peers did not run, with the reason.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import peers_images, peers_uci, shipped
from .quality_winners import winners
from .record import installed, save, say, surroundings

PACKAGES = ("laplace-torch", "nngeometry", "curvlinops-for-pytorch", "MAPIE", "scikit-learn")
SHIPPED_N = 600
"""Training images where no data are given: there are no more."""


def told(record: dict[str, Any]) -> Iterator[str]:
    """Lines: who is best at what, where a peer wins first; then what did not run."""
    if record["uci"] or record["images"]:
        yield "| question | best of the peers | best of whence | network alone |"
        yield "|---|---|---|---|"
    yield from (f"| {' | '.join(row)} |" for row in winners(record))
    gone = {
        name: method["failed"]
        for run in (*record["uci"], *record["images"])
        for name, method in run["methods"].items()
        if "failed" in method
    }
    yield from (f"did not run: {name}: {why}" for name, why in gone.items())


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several that were made side by side."""
    together = {part: [run for record in records for run in record[part]] for part in ("uci", "images")}
    seconds = round(sum(record["cpu_s"] for record in records), 1)
    commands = [command for record in records for command in record["commands"]]
    return {**records[0], **together, "cpu_s": seconds, "commands": commands}


def runs(given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], tuple[str, str]]]:
    """In whole rounds, a split of every set and a draw of the images in each: one that is stopped has a bit of all."""
    for turn in range(max(len(given.splits), len(given.draws))):
        for name in given.sets if "uci" in given.parts else ():
            for split in given.splits[turn : turn + 1]:
                yield "uci", peers_uci.run(given.data, name, split, given.steps), ("set", "split")
        for name in given.images if "images" in given.parts else ():
            for draw in given.draws[turn : turn + 1]:
                yield "images", peers_images.run(given.data, name, draw, given.n), ("set", "draw")


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with uci/, mnist/ and fashion-mnist/")
    parser.add_argument("--parts", nargs="+", choices=("uci", "images"), default=["uci", "images"])
    parser.add_argument("--sets", nargs="+", choices=peers_uci.SETS, default=list(peers_uci.SETS), help="of uci")
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2], help="of uci, published (default 0 1 2)")
    parser.add_argument("--draws", nargs="+", type=int, default=[100, 101, 102], help="of images (default 100 101 102)")
    parser.add_argument("--steps", type=int, default=1500, help="of training, on uci")
    parser.add_argument("--n", type=int, default=2000, help="training images")
    parser.add_argument("--out", type=Path, default=Path("out/quality_peers.json"))
    parser.add_argument("--append", action="store_true", help="keep the runs that the record has")
    parser.add_argument("--images", nargs="+", choices=peers_images.SETS, default=list(peers_images.SETS))
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--merge", nargs="+", type=Path, help="make one record of several, and compute nothing")
    given = parser.parse_args()
    if given.merge:
        save(given.out, merged([json.loads(path.read_text()) for path in given.merge]))
        return
    if given.data is None:
        given.sets, given.images, given.n = [shipped.TABLE], [shipped.IMAGES], min(given.n, SHIPPED_N)
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # of laplace-torch's gp, once for every batch
    packages = {name: installed(name) for name in PACKAGES}
    known = json.loads(given.out.read_text()) if given.append and given.out.exists() else {}
    record: dict[str, Any] = {**surroundings(given.commit), "packages": packages, "uci": [], "images": []}
    record |= {part: known[part] for part in ("uci", "images") if part in known}
    record["commands"] = [*known.get("commands", []), record["command"]]
    start = time.process_time() - known.get("cpu_s", 0.0)

    def keep(part: str, run: dict[str, Any], *same: str) -> None:
        record[part] = [one for one in record[part] if any(one[key] != run[key] for key in same)] + [run]
        record["cpu_s"] = round(time.process_time() - start, 1)
        save(given.out, record)
        say(part, *(run[key] for key in same), f"{record['cpu_s']:.0f} s")

    for part, run, same in runs(given):
        keep(part, run, *same)
    for line in told(record):
        say(line)


if __name__ == "__main__":
    main()
