"""What a fit of a language model costs, in forward + backward passes: `python -m benchmarks.tokens`.

A GPT-2-like model with random weights: time and memory do not depend on training. The linear layers of its blocks are
selected, as where such models are traced. `--shape gpt2 --device cuda --dtype bfloat16` has the sizes of GPT-2 small;
`llama-1b` and `llama-7b` are those of Llama 3.2 1B and Llama 2 7B, as `transformers` builds them. A structure may take
the last blocks alone, as `ekfac@6`; where a fit is refused, `--follow` takes as many as the error names.
"""

from __future__ import annotations

import argparse
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import whence
from whence import fitting
from whence.curvature import accumulate, core, kronecker, primal

from .record import save, say, surroundings

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"layers": 4, "width": 128, "heads": 4, "words": 8000, "tokens": 128, "size": 256},
    "gpt2": {"layers": 12, "width": 768, "heads": 12, "words": 50257, "tokens": 1024, "size": 4096},
    "llama-tiny": {"layers": 2, "width": 64, "heads": 4, "words": 500, "tokens": 32, "size": 64, "hidden": 160},
    "llama-1b": {"layers": 16, "width": 2048, "heads": 32, "words": 128256, "tokens": 1024, "size": 4096}
    | {"hidden": 8192, "keys": 8},
    "llama-7b": {"layers": 32, "width": 4096, "heads": 32, "words": 32000, "tokens": 1024, "size": 4096}
    | {"hidden": 11008},
}
"""Sizes by name; those with hidden units of their own are Llamas."""
TIMED = 512
"""Sequences whose forward + backward are timed: more take as long each."""


class Block(nn.Module):
    """Causal attention and two linear layers, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width)."""
        n, t, width = x.shape
        parts = self.attention(self.before(x)).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """Logits (n, t, words) of the next token, with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, words: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.1)

    def hidden(self, x: Tensor) -> Tensor:
        """(n, t, width) before the output layer, of token numbers (n, t)."""
        hidden = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        found: Tensor = self.last(hidden)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Of token numbers (n, t)."""
        return nn.functional.linear(self.hidden(x), self.words.weight)


class Llama(nn.Module):
    """A Llama of random weights, made by `transformers`."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # an extra

        config = LlamaConfig(
            vocab_size=given.words,
            hidden_size=given.width,
            intermediate_size=given.hidden,
            num_hidden_layers=given.layers,
            num_attention_heads=given.heads,
            num_key_value_heads=given.keys or given.heads,
            use_cache=False,
        )
        with torch.device(given.device):  # slow to draw on a CPU
            self.blocks = LlamaForCausalLM._from_config(config, dtype=getattr(torch, given.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, t, words) of token numbers (n, t)."""
        logits: Tensor = self.blocks(input_ids=x).logits
        return logits


def built(given: argparse.Namespace) -> nn.Module:
    """A model of the sizes that were asked for, of which the linear layers of the blocks want gradients."""
    if given.hidden:
        model: nn.Module = Llama(given)
    else:
        longest = max(given.tokens, getattr(given, "query_tokens", 0))
        model = Model(given.layers, given.width, given.heads, given.words, longest)
    model = model.to(given.device, getattr(torch, given.dtype)).eval()
    trace(model, given.layers)
    return model


def traced(model: nn.Module, layers: int, last: int = 0) -> list[str]:
    """Names of the linear layers of the last so many blocks of a model with so many; of all for zero."""
    found = []
    for name, module in model.named_modules():
        at = re.search(r"blocks\.(?:model\.layers\.)?(\d+)\.", name)
        if isinstance(module, nn.Linear) and at is not None and int(at.group(1)) >= layers - (last or layers):
            found.append(name)
    return found


def trace(model: nn.Module, layers: int, last: int = 0) -> None:
    """Let the weights of these layers want gradients, and nothing else."""
    model.requires_grad_(False)
    for name in traced(model, layers, last):
        model.get_submodule(name).weight.requires_grad_(True)


def clock(device: str) -> float:
    """Seconds; on a CPU those of the processor, which others on the machine do not lengthen by waiting."""
    return time.perf_counter() if device == "cuda" else time.process_time()


def spent(work: Callable[[], object], device: str) -> float:
    """Seconds of some work, on a device that is waited for."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock(device)
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock(device) - start


@contextmanager
def stages(device: str) -> Iterator[dict[str, float]]:
    """Seconds that the parts of a fit take meanwhile, each waited for; parts within others are counted in both."""
    found: dict[str, float] = {}

    def timed(work: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            answer: list[Any] = []
            took = spent(lambda: answer.append(work(*args, **kwargs)), device)
            label = name or args[1].label
            found[label] = found.get(label, 0.0) + took
            return answer[0]

        return timing

    parts: list[tuple[Any, str, str | None]] = [
        (fitting, "linearize", "outputs and labels"),
        (fitting, "assemble", "sandwich"),
        (fitting, "_with_trust", "trust"),
        (accumulate.LayerGradients, "__init__", "capture, verified"),
        (accumulate.LayerGradients, "accumulate", None),
        (kronecker, "decompose", "eigenvectors"),
        (primal, "factorize", "factor"),
        (core, "sketch_features", "drawing of the sketch"),
    ]
    before = [getattr(owner, name) for owner, name, _ in parts]
    for (owner, name, label), work in zip(parts, before, strict=True):
        setattr(owner, name, timed(work, label))
    try:
        yield found
    finally:
        for (owner, name, _), work in zip(parts, before, strict=True):
            setattr(owner, name, work)


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Forward and backward, once over the data."""
    for x, y in batches:
        model.zero_grad()
        cross_entropy(model(x).flatten(0, 1).float(), y.flatten()).backward()
    model.zero_grad()


def peak(device: str) -> float:
    """GiB that this process, or its tensors on the device, ever took."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def profiled(work: Callable[[], object], device: str) -> list[dict[str, Any]]:
    """The kernels that take longest, their seconds and calls."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        spent(work, device)
    rows = [(row.self_device_time_total if cuda else row.self_cpu_time_total, row) for row in seen.key_averages()]
    ordered = sorted(rows, key=lambda pair: -pair[0])[:25]
    return [{"kernel": row.key[:120], "seconds": took / 1e6, "calls": row.count} for took, row in ordered]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a forward + backward, and multiples of it."""
    torch.manual_seed(0)
    if given.device == "cpu":
        torch.set_num_threads(given.threads)
    model = built(given)
    batches = sequences(given)
    found: dict[str, Any] = {**passed(model, batches, given), "peak before, GiB": peak(given.device)}
    say(found)
    for columns in given.columns:
        for text in given.structures:
            name, _, last = text.partition("@")
            measure_fit(model, batches, found, given, name, int(last or 0), columns)
    return found


def sequences(given: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Batches of random tokens, and of those that follow."""
    tokens = torch.randint(0, given.words, (given.sequences, given.tokens + 1), device=given.device)
    return [(some[:, :-1], some[:, 1:].contiguous()) for some in tokens.split(given.batch)]


def passed(model: nn.Module, batches: list[tuple[Tensor, Tensor]], given: argparse.Namespace) -> dict[str, Any]:
    """Sizes of a model, and what a forward + backward costs down to the first layer that wants gradients."""
    timed = batches[: max(1, TIMED // given.batch)]
    train(model, timed[:2])  # warm
    share = sum(len(x) for x, _ in timed) / given.sequences
    once = min(spent(lambda: train(model, timed), given.device) for _ in range(3)) / share
    return {
        "forward + backward, seconds": once,
        "forward + backward, tokens a second": given.sequences * given.tokens / once,
        "weights": sum(p.numel() for p in model.parameters()),
        "selected": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


Batches = list[tuple[Tensor, Tensor]]
Fit = Callable[[Batches], whence.Tracer]


def measure_fit(
    model: nn.Module,
    batches: Batches,
    found: dict[str, Any],
    given: argparse.Namespace,
    name: str,
    last: int,
    columns: int,
) -> None:
    """Add a fit of the last so many blocks, all for zero; where it is refused, of as many as the error names."""
    structure = {
        "sketch": whence.Sketch(size=given.size),
        "core": whence.Core(size=given.size),
        "ekfac": whence.EKFAC(),
    }[name]
    options: dict[str, Any] = {"ridge": given.ridge, "hessian_columns": columns, "progress": False}
    if given.memory:
        options["execution"] = whence.Execution(max_memory=int(given.memory * 2**30))

    def fit(data: Batches) -> whence.Tracer:
        return whence.fit(model, data, "categorical", structure, given.parameters, **options)

    trace(model, given.layers, last)
    label = f"{name}, {columns} columns" + (f", the last {last} of {given.layers} blocks" if last else "")
    row = passed(model, batches, given) if last else {}
    found[label] = row
    once, refused = (row or found)["forward + backward, seconds"], ""
    try:
        measure_seconds(fit, batches, row, given, once, asks=bool(given.queries) and name in given.asked)
    except whence.TooLargeError as error:
        refused = str(error)
    if not refused:
        if given.stages:
            with stages(given.device) as seconds:
                fit(batches)
            row["stages"] = {part: one / once for part, one in seconds.items()}
        if given.profile:
            row["kernels"] = profiled(lambda: fit(batches), given.device)
    else:
        row["refused"] = refused
    say(label, row)
    write(given, found)
    named = re.search(r"the last (\d+) of", refused)
    fewer = int(named.group(1)) if named else last - 1
    if refused and given.follow and fewer > 0:
        measure_fit(model, batches, found, given, name, fewer, columns)


def measure_seconds(
    fit: Fit, batches: Batches, row: dict[str, Any], given: argparse.Namespace, once: float, asks: bool
) -> None:
    """Add what a fit takes, and its answers, to a row."""
    if not given.cold:
        fit(batches[:1])  # modules are imported and libraries loaded by the first fit of a process
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    kept: list[whence.Tracer] = []
    with ExitStack() as stack:
        parts = stack.enter_context(stages(given.device)) if given.parts else {}
        took = spent(lambda: kept.append(fit(batches)), given.device)
    row |= {"seconds": took, "multiple": took / once, "tokens a second": given.sequences * given.tokens / took}
    row["peak, GiB"] = peak(given.device)
    if parts:
        row["stages"] = {part: one / once for part, one in parts.items()}
    say(row)
    if asks:
        row["variance of the last word and its sequences, seconds"] = asked(kept[0], given)


def asked(tracer: whence.Tracer, given: argparse.Namespace) -> float:
    """Seconds of one batch of queries: the variance of each one's last word, and its 100 first training sequences."""
    queries = torch.randint(0, given.words, (given.queries, given.query_tokens or given.tokens), device=given.device)
    ask: dict[str, Any] = {"top": min(100, given.sequences), "positions": [-1]}
    tracer.attribute(queries, **ask)  # warm
    return spent(lambda: tracer.attribute(queries, **ask), given.device)


def write(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """To a file, where one was given."""
    if given.out is not None:
        setting = {key: value for key, value in vars(given).items() if key != "out"}
        save(given.out, {"surroundings": surroundings(), "setting": setting, "found": found})


def errors(draws: int, sequences: int, width: int, columns: tuple[int, ...]) -> dict[str, Any]:
    """How far variances from c columns are from those of all outputs, on a small model in double precision.

    Trained a little on a Markov chain: sequences of 8 words out of 40. Errors are those of the logits of predicted
    words at every position of 16 other sequences: the mean of |v / w - 1|, and the mean of v / w, over `draws` seeds.
    """
    torch.manual_seed(0)
    chain = torch.distributions.Categorical(logits=2.0 * torch.randn(40, 40))
    tokens = [torch.randint(0, 40, (sequences + 16,))]
    for _ in range(8):
        tokens.append(chain.sample((sequences + 16,)).gather(1, tokens[-1].unsqueeze(1)).squeeze(1))
    data = torch.stack(tokens, dim=1)
    model = Model(1, width, 2, 40, 8).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        cross_entropy(model(data[:sequences, :-1]).flatten(0, 1), data[:sequences, 1:].flatten()).backward()
        optimizer.step()
    model.eval().requires_grad_(True)
    batches, test = [(data[:sequences, :-1], data[:sequences, 1:].contiguous())], data[sequences:, :-1]

    def variances(count: Any, seed: int) -> dict[str, Tensor]:
        execution = whence.Execution(seed=seed)
        options: dict[str, Any] = {"ridge": 1.0, "progress": False, "hessian_columns": count, "execution": execution}
        structure = whence.Exact("primal")
        tracer = whence.fit(model, batches, "categorical", structure, parameters="blocks.*.weight", **options)
        found = tracer.predict(test, outputs="predicted")
        return {name: found.variance(name) for name in ("ho", "hec3")}

    every = variances("all", 0)
    rows: dict[str, Any] = {}
    for count in columns:
        ratios = [{name: one / every[name] for name, one in variances(count, seed).items()} for seed in range(draws)]
        for name in every:
            each = torch.stack([one[name] for one in ratios])
            row = {"mean error": float((each - 1).abs().mean()), "mean ratio": float(each.mean())}
            rows[f"{name}, {count} columns"] = row
            say(f"{name}, {count} columns", row)
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where it runs, sizes, and the name of the file."""
    add = parser.add_argument
    add("--device", default="cpu")
    add("--dtype", default="float32")
    add("--threads", type=int, default=1)
    add("--shape", choices=SHAPES, default="small", help="sizes, which other options replace")
    for name in ("layers", "width", "heads", "words", "tokens", "size"):
        add(f"--{name}", type=int)
    add("--hidden", type=int, default=0, help="units between the two layers of a block: then it is a Llama")
    add("--keys", type=int, default=0, help="heads of keys and values of a Llama, if fewer")
    add("--sequences", type=int, default=32)
    add("--batch", type=int, default=8)
    add("--out", type=Path)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with the sizes of the shape that was asked for."""
    parser.set_defaults(**SHAPES[parser.parse_known_args()[0].shape])
    return parser.parse_args()


def main() -> None:
    """Measure and write everything down."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    add = parser.add_argument
    add("--columns", type=int, nargs="+", default=[4, 16])
    add("--structures", nargs="+", default=["sketch", "core", "ekfac"])
    add("--ridge", type=float, default=1.0)
    add("--stages", action="store_true", help="fit once more, and say what its parts take, in multiples too")
    add("--parts", action="store_true", help="the same, from the fit that is timed")
    add("--memory", type=float, default=0.0, help="GiB that a fit may take, if not what is free")
    add("--follow", action="store_true", help="where a fit is refused, fit as many blocks as the error names")
    add("--queries", type=int, default=0, help="sequences whose last word is attributed, in seconds")
    add("--asked", nargs="+", default=["sketch", "core", "ekfac"], help="structures that answer them")
    add("--query-tokens", type=int, default=0, help="their length, if not that of the training sequences")
    add("--cold", action="store_true", help="without a first fit of one batch, which takes long for large layers")
    add("--parameters", default="all", help="names of weights, among the linear layers of the blocks")
    add("--profile", action="store_true", help="fit once more, and list the kernels that take longest")
    add("--errors", type=int, default=0, help="instead, errors of variances over so many draws")
    add("--small", type=int, nargs=2, default=[120, 4], help="with --errors: sequences, and width of the model")
    given = parsed(parser)
    write(given, {"errors": errors(given.errors, *given.small, given.columns)} if given.errors else measure(given))


if __name__ == "__main__":
    main()
