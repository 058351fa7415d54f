"""Where the seconds of the leverage pass go: launches or kernels, by block, by kernel, by chunk size."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import whence
from whence.curvature import spectral
from whence.curvature.accumulate import ChunkGradients
from whence.runtime.model_state import rounded_products

from .data import batches, random_images
from .gpu_cifar import NETWORKS
from .where import PARTS, Clock, kind_of

DONE: dict[str, Any] = {}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Any, device: torch.device) -> dict[str, float]:
    """Seconds until Python is done, and until the GPU is."""
    wait(device)
    start = perf_counter()
    work()
    launched = perf_counter() - start
    wait(device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"python": round(launched, 4), "all": round(perf_counter() - start, 4), "peak": round(peak, 2)}


def kernels(work: Any, device: torch.device, rows: int = 45) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        seconds = timed(work, device)
    spent: dict[str, float] = defaultdict(float)
    longest, launches = [], 0
    for event in seen.key_averages():
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        spent[kind_of(event.key)] += own
        launches += event.count
        longest.append((round(own, 4), event.count, event.key[:170]))
    return {
        "seconds": seconds,
        "launches": launches,
        "busy": round(sum(spent.values()), 4),
        "kinds": {k: round(v, 4) for k, v in spent.items()},
        "longest": sorted(longest, reverse=True)[:rows],
    }


def by_shape(work: Any, device: torch.device, rows: int = 90) -> list[Any]:
    """The longest operations with the shapes they have."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=kinds, record_shapes=True) as seen:
        timed(work, device)
    found = []
    for event in seen.key_averages(group_by_input_shape=True):
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        found.append((round(own, 5), event.count, event.key[:60], str(event.input_shapes)[:140]))
    return sorted(found, reverse=True)[:rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--structure", default="fp16")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("out/leverage_profile.json"))
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.manual_seed(0)
    net = NETWORKS[given.network]().to(device).eval()
    split = random_images(given.n, 0, (3, 32, 32))
    x, y = split.inputs.to(device), whence.one_hot(split.labels.to(device), 10)
    loader = batches(x, y, given.batch)
    kept: dict[str, Any] = {}
    before = spectral.Leverage.__init__

    def remember(self: Any, *args: Any) -> None:
        kept["args"] = args
        before(self, *args)

    spectral.Leverage.__init__ = remember  # type: ignore[method-assign]
    found: dict[str, Any] = {"torch": torch.__version__}

    def save() -> None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1))

    def fit() -> None:
        kept["tracer"] = whence.fit(
            net,
            loader,
            structure="ekfac",
            ridge=0.003 * given.n,
            progress=False,
            execution=whence.Execution(precision=given.structure),
        )

    found["fit_cold"] = timed(fit, device)
    found["fit"] = timed(fit, device)
    found["notes"] = [one.value for one in kept["tracer"].diagnostics if one.name == "note"]
    stream, bases, spectrum, ridge, roots, _ = kept["args"]
    problem = stream.problem
    found["shapes"] = [(b.block.matrix_shape, b.shape) for b in bases]
    save()

    def leverage() -> Any:
        with rounded_products(True):
            one = spectral.Leverage(stream, bases, spectrum, ridge, roots)
            for _ in ():
                pass
            return stream.accumulate(one, last=True)

    def network_alone() -> None:
        with rounded_products(True):
            for inputs, _ in loader:
                for chunk in stream.of(inputs, stream.identity(10), 10):
                    del chunk

    def predict() -> None:
        kept["tracer"].predict([inputs for inputs, _ in loader])

    for label, work in (("leverage", leverage), ("network", network_alone), ("predict", predict)):
        work()
        found[label] = timed(work, device)
        found[f"{label}_kernels"] = kernels(work, device)
        print(label, found[label], found[f"{label}_kernels"]["kinds"], found[f"{label}_kernels"]["launches"], flush=True)
        save()
    found["leverage_shapes"] = by_shape(leverage, device)
    save()
    usual = problem.chunk_size
    for size in (250, 500, 1000):
        object.__setattr__(problem, "chunk_size", size)
        for label, work in (("leverage", leverage), ("network", network_alone), ("predict", predict)):
            try:
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                work()
                found[f"{label}, chunks of {size}"] = timed(work, device)
                print(label, size, found[f"{label}, chunks of {size}"], flush=True)
            except Exception as error:  # noqa: BLE001
                found[f"{label}, chunks of {size}"] = str(error)[:200]
        save()
    object.__setattr__(problem, "chunk_size", usual)
    # by block, waiting: both iterations of the leverage pass
    spent: dict[str, float] = defaultdict(float)
    yielded = ChunkGradients.__iter__
    state = {"round": 0}

    def watched(self: Any) -> Any:
        state["round"] += 1
        which = "meats" if self._reads_left == 1 else "leverage"
        wait(device)
        for view in yielded(self):
            wait(device)
            start = perf_counter()
            name = f"{which} {view.basis.block.name} {tuple(view.basis.block.matrix_shape)} {tuple(view.basis.shape)}"
            yield view
            wait(device)
            spent[name] += perf_counter() - start

    ChunkGradients.__iter__ = watched  # type: ignore[method-assign]
    leverage()
    ChunkGradients.__iter__ = yielded  # type: ignore[method-assign]
    found["blocks"] = {name: round(s, 4) for name, s in sorted(spent.items(), key=lambda p: -p[1])}
    save()
    clock = Clock(device)
    for owner, name, part in PARTS:
        clock.watch(owner, name, part)
    clock.start()
    leverage()
    found["parts"] = clock.stop()
    found["calls"] = {f"{stage}: {part}": count for (stage, part), count in clock.calls.items()}
    clock.start()
    predict()
    found["predict_parts"] = clock.stop()
    save()
    variants: dict[str, Any] = {}
    capture = stream.capture(x[:8])
    for last in (False, True):
        form = torch.channels_last if last else torch.contiguous_format
        net.to(memory_format=form)
        shaped = x[: given.batch].contiguous(memory_format=form)
        for batched in (True, False):
            for size in (given.batch // 4, given.batch // 2, given.batch):

                def pull(shaped: Any = shaped, size: int = size, batched: bool = batched) -> None:
                    for some in shaped.split(size):
                        run = capture.run(some)
                        eye = torch.eye(10, device=device).unsqueeze(1).expand(-1, len(some), -1)
                        run.tangents(eye, last=True, batched=batched)

                pull()
                label = f"channels last {last}, batched {batched}, {size}"
                variants[label] = timed(pull, device)
                print(label, variants[label], flush=True)
    found["network variants"] = variants
    save()
    if device.type == "cuda":
        net.to(memory_format=torch.contiguous_format)
        for size in (given.batch // 2,):
            try:
                some = x[:size].clone()
                eye = torch.eye(10, device=device).unsqueeze(1).expand(-1, size, -1)

                def once(some: Any = some, eye: Any = eye) -> Any:
                    with rounded_products(True):
                        return capture.run(some).tangents(eye, last=True, batched=True)

                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        once()
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    held = once()
                found[f"graph of the network, {size}"] = [timed(graph.replay, device) for _ in range(3)]
                found["graph_eager"] = [timed(once, device) for _ in range(3)]
                del held
            except Exception as error:  # noqa: BLE001
                found[f"graph of the network, {size}"] = f"{type(error).__name__}: {str(error)[:400]}"
            print(found.get(f"graph of the network, {size}"), found.get("graph_eager"), flush=True)
        save()
    print(json.dumps({k: found[k] for k in ("blocks", "parts", "predict_parts")})[:6000])


if __name__ == "__main__":
    main()
