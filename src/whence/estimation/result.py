"""What a fit would take: memory by stage, time by step, and what else there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whence.display import count
from whence.memory import readable
from whence.progress import clock


@dataclass(frozen=True)
class Alternative:
    """Another structure for the same problem.

    Attributes:
        structure: its name.
        memory: bytes at its peak.
        seconds: of its fit.
    """

    structure: str
    memory: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a fit, from sizes and from a small batch that was measured.

    Attributes:
        structure: what would be fitted.
        examples: training examples.
        outputs: of the network.
        parameters: selected weights.
        stages: bytes held at once in each stage of the fit, beside the model and the data.
        bounded: whether the memory is an upper bound, since the structure chooses its size from the data.
        limit: bytes that may be taken.
        steps: seconds of each part of the fit.
        prediction: seconds for a thousand predictions.
        alternatives: the other structures.
        one_layer: whether all selected weights belong to one layer.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> found = whence.estimate(torch.nn.Linear(1, 1), [(x, 2 * x)])
        >>> found.structure, found.parameters, found.fits
        ('exact (primal road)', 2, True)
    """

    structure: str
    examples: int
    outputs: int
    parameters: int
    stages: Mapping[str, float]
    bounded: bool
    limit: int
    steps: Mapping[str, float]
    prediction: float
    alternatives: tuple[Alternative, ...]
    one_layer: bool = False

    @property
    def memory(self) -> float:
        """Bytes at the peak, beside the model and the data."""
        return max(self.stages.values())

    @property
    def seconds(self) -> float:
        """Of the whole fit."""
        return sum(self.steps.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.memory <= self.limit

    def __str__(self) -> str:
        """A few lines."""
        about = "at most " if self.bounded else "about "
        verdict = "fits" if self.fits else "does NOT fit"
        lines = [
            f"{self.structure}: {count(self.examples, 'example')}, {count(self.outputs, 'output')}, "
            f"{count(self.parameters, 'parameter')}",
            f"  memory   {about}{readable(self.memory)}, {verdict} in {readable(self.limit)}",
            *(f"    {stage:<24} {readable(size):>10}" for stage, size in self.stages.items()),
            f"  time     about {duration(self.seconds)}; {duration(self.prediction)} for a thousand predictions",
            *(f"    {step:<24} {duration(spent):>10}" for step, spent in self.steps.items()),
            "  instead",
        ]
        lines += [
            f"    {one.structure:<24} {readable(one.memory):>10}{' ' if one.memory <= self.limit else '!'} "
            f"{duration(one.seconds):>10}"
            for one in self.alternatives
        ]
        if any(one.memory > self.limit for one in self.alternatives):
            lines.append("    ! does not fit")
        if not self.fits:
            fewer = "" if self.one_layer else 'parameters="last_layer", '
            few = "fewer outputs (outputs=...), " if self.outputs > 1 else ""
            lines.append(f"  or: {fewer}{few}a smaller chunk_size, fewer examples, a larger max_memory")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line."""
        about = "at most" if self.bounded else "about"
        return (
            f"Estimate({self.structure}: {about} {readable(self.memory)} of {readable(self.limit)}, about "
            f"{duration(self.seconds)})"
        )


def duration(seconds: float) -> str:
    """Seconds for people, the small ones too.

    Examples:
        >>> duration(0.012), duration(3.21), duration(125)
        ('12 ms', '3.2 s', '2 min 05 s')
    """
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.0005 else "0 ms"
    return f"{seconds:.1f} s" if seconds < 10 else clock(seconds)
