"""What no fit can beat on a GPU: the network's own passes, eigendecompositions, products; in each precision.

    python -m benchmarks.floors --device cuda --out results/floors.json

Passes go forward and, for each of k outputs, back to the outputs of all layers, without gradients of weights.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .gpu_cifar import NETWORKS, profile_arguments
from .record import attempt, save, say, surroundings
from .reference import wall_seconds
from .variants import precision

Row = dict[str, Any]
SIZES = (512, 1152, 2304, 4608)


def pass_seconds(net: nn.Module, x: Tensor, given: argparse.Namespace, half: bool, last: bool, together: bool) -> Row:
    """Seconds of a pass over images: in bfloat16 or not, channels last or not, the k outputs together or in turn."""
    device = torch.device(given.device)
    order = torch.channels_last if last else torch.contiguous_format
    net = net.to(memory_format=order)
    layers: list[Tensor] = []
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
    hooks = [m.register_forward_hook(lambda *a: layers.append(a[2])) for m in net.modules() if isinstance(m, kinds)]
    eye = torch.eye(10, device=device)

    def run(parts: tuple[Tensor, ...]) -> None:
        for part in parts:
            layers.clear()
            cast: AbstractContextManager[Any] = torch.autocast(device.type, torch.bfloat16) if half else nullcontext()
            with cast:
                outputs = net(part.to(memory_format=order))
            cotangents = eye.unsqueeze(1).expand(-1, len(part), -1).to(outputs.dtype)
            if together:
                torch.autograd.grad(outputs, layers, cotangents, is_grads_batched=True)
                continue
            for at, one in enumerate(cotangents):
                torch.autograd.grad(outputs, layers, one, retain_graph=at < 9)

    try:
        parts = x.split(given.batch)
        run(parts[:1])
        return {"seconds": wall_seconds(lambda: run(parts), device)}
    finally:
        for hook in hooks:
            hook.remove()


def eigh_seconds(size: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Seconds of an eigendecomposition, and how far it is from one: of A - U diag(s) U^T, and of U^T U - I."""
    rows = torch.randn(2 * size, size, dtype=dtype, device=device) * torch.logspace(0, -3, size, dtype=dtype).to(device)
    matrix = rows.T @ rows
    torch.linalg.eigh(matrix[:64, :64])
    found: list[Tensor] = []
    seconds = wall_seconds(lambda: found.extend(torch.linalg.eigh(matrix)), device)
    values, vectors = (one.double() for one in found)
    wide = matrix.double()
    gap = float((wide - vectors * values @ vectors.T).norm() / wide.norm())
    eye = torch.eye(size, dtype=torch.float64, device=device)
    return {"seconds": seconds, "gap": gap, "orthogonality": float((vectors.T @ vectors - eye).abs().max())}


def product_rates(device: torch.device, n: int) -> dict[str, float]:
    """Seconds for products like a fit's: matrices of 64 examples' gradients of ten outputs, and large ones."""
    found: dict[str, float] = {}
    shapes = {"layer 1": (64, 576, 1024), "layer 2": (128, 1152, 256), "layer 3": (256, 600, 64), "4": (256, 1152, 16)}
    for dtype in (torch.float32, torch.bfloat16):
        for name, (o, i, t) in shapes.items():
            g, a = torch.randn(n, 10 * o, t, device=device).to(dtype), torch.randn(n, t, i, device=device).to(dtype)
            out = g @ a
            torch.bmm(g, a, out=out)
            found[f"matrices {name} {dtype}"] = wall_seconds(lambda g=g, a=a, out=out: torch.bmm(g, a, out=out), device)
        big = torch.randn(64 * n, 1152, device=device).to(dtype)
        side = torch.randn(1152, 1152, device=device).to(dtype)
        _ = big @ side
        found[f"rotation of {64 * n} x 1152 {dtype}"] = wall_seconds(lambda big=big, side=side: big @ side, device)
        found[f"gram of {64 * n} x 1152 {dtype}"] = wall_seconds(lambda big=big: big.T @ big, device)
        found[f"copy of {64 * n} x 1152 {dtype}"] = wall_seconds(lambda big=big: big.clone(), device)
    return found


def main() -> None:
    """Measure, and write the record."""
    parser = profile_arguments(__doc__, "out/floors.json", 4000)
    given = parser.parse_args()
    sizes: tuple[int, ...] = SIZES
    if given.tiny:
        given.network, given.n, given.batch, sizes = "tiny", 20, 10, (32,)
    device = torch.device(given.device)
    net = NETWORKS[given.network]().to(device).eval()
    x = torch.randn(given.n, 3, 32, 32, device=device)
    record: dict[str, Any] = {**surroundings(given.commit), "n": given.n, "passes": [], "eigh": [], "products": {}}
    for tf32, half in ((False, False), (True, False), (True, True)):
        for last in (False, True):
            for together in (False, True):
                row: dict[str, Any] = {"tf32": tf32, "bf16": half, "channels_last": last, "together": together}
                measured = partial(pass_seconds, net, x, given, half, last, together)
                with precision(tf32):
                    said = attempt(row, measured, lambda row: f"{row['seconds']:.3f} s")
                say(f"tf32 {tf32}, bf16 {half}, channels last {last}, outputs together {together}: {said}")
                record["passes"].append(row)
                save(given.out, record)
    for size in sizes:
        for dtype in (torch.float32, torch.float64):
            row = {"size": size, "dtype": str(dtype)}
            said = attempt(row, partial(eigh_seconds, size, dtype, device), str)
            say(f"eigh {size} {dtype}: {said}")
            record["eigh"].append(row)
            save(given.out, record)
    with precision(True):
        record["products"] = product_rates(device, 4 if given.tiny else 256)
    for name, seconds in record["products"].items():
        say(f"{name}: {1000 * seconds:.2f} ms")
    save(given.out, record)


if __name__ == "__main__":
    main()
