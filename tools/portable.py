"""Run the tests under every code path that this CPU has: `python tools/portable.py [SETTING...] [-- PYTEST OPTION...]`.

Sums round differently from one CPU to another. Intel's MKL and torch's own kernels can be told to take the paths that
they take elsewhere, and sums are cut differently among more threads. The settings run one after the other, a failure
keeps none of them back, and a table at the end says what failed where. `--list` names the settings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "mkl-avx2": {"MKL_CBWR": "AVX2"},
    "mkl-instructions-avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "threads-2": {"OMP_NUM_THREADS": "2"},
    "threads-4": {"OMP_NUM_THREADS": "4"},
}
CHOSEN_HERE = {name for setting in SETTINGS.values() for name in setting}


@dataclass(frozen=True)
class Outcome:
    """What came of the tests under one setting."""

    setting: str
    passed: int
    failed: tuple[str, ...]
    skipped: int
    seconds: float
    status: int

    @property
    def fine(self) -> bool:
        """Whether tests ran, and none failed."""
        return self.status == 0 and not self.failed


def environment(setting: str, around: Mapping[str, str]) -> dict[str, str]:
    """The variables of one setting; what is set around it counts only where no setting chooses it.

    Threads that wait sleep: where there are more than cores, those that spin keep the others from their work.

    Examples:
        >>> environment("threads-2", {"MKL_CBWR": "AVX2", "HOME": "/root"})
        {'HOME': '/root', 'OMP_WAIT_POLICY': 'PASSIVE', 'OMP_NUM_THREADS': '2'}
    """
    rest = {name: value for name, value in around.items() if name not in CHOSEN_HERE}
    return {**rest, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", **SETTINGS[setting]}


def read(record: Path, setting: str, seconds: float, status: int) -> Outcome:
    """What pytest wrote down, in the form of JUnit."""
    cases = list(ET.parse(record).getroot().iter("testcase")) if record.exists() else []
    failed = tuple(
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if {"failure", "error"} & {one.tag for one in case}
    )
    skipped = sum(any(one.tag == "skipped" for one in case) for case in cases)
    return Outcome(setting, len(cases) - len(set(failed)) - skipped, failed, skipped, seconds, status)


def run(setting: str, arguments: Sequence[str]) -> Outcome:
    """The tests under one setting."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={record}", *arguments]
        since = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=environment(setting, os.environ))
        return read(record, setting, time.monotonic() - since, done.returncode)


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each setting, and under it what failed.

    Examples:
        >>> print(table([Outcome("aten-avx2", 7, ("tests.test_sums::test_long",), 1, 12.3, 1)]))
        setting                 passed  failed  skipped  seconds
        aten-avx2                    7       1        1       12
            tests.test_sums::test_long
    """
    lines = [f"{'setting':22}  passed  failed  skipped  seconds"]
    for one in outcomes:
        lines.append(f"{one.setting:22}  {one.passed:6}  {len(one.failed):6}  {one.skipped:7}  {one.seconds:7.0f}")
        lines += [f"    {name}" for name in one.failed]
        if one.status and not one.failed:
            lines.append(f"    pytest ended with status {one.status}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the settings that are named, or all of them; 1 if a test failed in any."""
    if "--list" in arguments:
        print(
            *(f"{name:22}  {' '.join(f'{a}={b}' for a, b in one.items())}" for name, one in SETTINGS.items()), sep="\n"
        )
        return 0
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    named, rest = list(arguments[:cut]) or list(SETTINGS), list(arguments[cut + 1 :])
    wrong = [name for name in named if name not in SETTINGS]
    if wrong:
        print(f"expected settings among {', '.join(SETTINGS)}, got {', '.join(wrong)}.", file=sys.stderr)
        return 2
    outcomes = []
    for number, name in enumerate(named, 1):
        words = " ".join(f"{a}={b}" for a, b in SETTINGS[name].items())
        print(f"{number} of {len(named)}: {name} {words}", flush=True)
        outcomes.append(run(name, rest))
    print(table(outcomes))
    return int(not all(one.fine for one in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
