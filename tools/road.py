"""How far a call travels through the library: modules, functions and hops between packages of fit, predict and explain.

Run `python tools/road.py` for the table that docs/architecture.md shows; `--modules` lists the modules too.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import whence

SOURCE = str(Path(whence.__file__).parent) + "/"


class Road:
    """Functions of whence that run while a road is open, in the order in which they call each other."""

    def __init__(self) -> None:
        """Nothing has been called yet."""
        self.calls: Counter[tuple[str, str]] = Counter()
        self.hops: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call: what `sys.setprofile` does with every one."""
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(SOURCE):
            return
        module = path.removeprefix(SOURCE).removesuffix(".py")
        name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        if name == "<module>":
            return
        self.calls[module, name] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(SOURCE):
            caller = caller.f_back
        if caller is not None:
            origin = package(caller.f_code.co_filename.removeprefix(SOURCE).removesuffix(".py"))
            if origin != package(module):
                self.hops.add((f"{origin}:{caller.f_code.co_name}", f"{package(module)}:{name}"))

    @property
    def modules(self) -> list[str]:
        """The modules that were passed through."""
        return sorted({module for module, _ in self.calls})


def package(module: str) -> str:
    """The package of a module: curvature/kronecker/core -> curvature/kronecker, and a module at the top itself."""
    return module.rsplit("/", 1)[0] if "/" in module else module


def follow(call: Callable[[], Any]) -> tuple[Road, Any]:
    """The road of a call, and what it returned."""
    road = Road()
    sys.setprofile(road)
    try:
        found = call()
    finally:
        sys.setprofile(None)
    return road, found


def roads(structure: str) -> dict[str, Road]:
    """The roads of fit, predict and explain on a network of two layers."""
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    y = x[:, :1].sin()
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).eval()
    batches = [(x[:30], y[:30]), (x[30:], y[30:])]
    fit, tracer = follow(lambda: whence.fit(model, batches, structure=structure, ridge=0.1, progress=False))
    predict, _ = follow(lambda: tracer.predict(x[:5]))
    explain, _ = follow(lambda: tracer.explain(x[:5]))
    return {"fit": fit, "predict": predict, "explain": explain}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", action="store_true", help="list the modules of each road")
    options = parser.parse_args()
    measured = {structure: roads(structure) for structure in ("ekfac", "core")}
    print("| call (ekfac / core) | modules | functions | hops between packages |")
    print("|---|---|---|---|")
    for call in ("fit", "predict", "explain"):
        both = [measured[structure][call] for structure in measured]
        cells = [[len(one.modules), len(one.calls), len(one.hops)] for one in both]
        print(f"| `{call}` | " + " | ".join(f"{a} / {b}" for a, b in zip(*cells, strict=True)) + " |")
    if options.modules:
        for structure, found in measured.items():
            for call, road in found.items():
                print(f"\n{structure}, {call}:")
                for module in road.modules:
                    print(f"  {module}: {', '.join(name for at, name in road.calls if at == module)}")


if __name__ == "__main__":
    main()
