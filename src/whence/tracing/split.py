"""HeC3 in parts: what new labels would change, what new inputs would change, and what belongs to neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from whence.display import Column, Shown, Table, count, numbers, places, rows_shown
from whence.tangents.batches import Inputs, batch_size, take

from .alignments import alignments
from .fitted import Fitted
from .sources import Sources
from .tables import frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Split(Shown):
    """Parts of HeC3, which they sum to.

    Experimental: right on average only where what the model cannot represent is smooth over the distances between
    training examples (anything rougher counts as noise), and different from training set to training set. See
    docs/sources.md for how far off the parts were on simulations.

    Attributes:
        hec3: (m, k) summed over training examples.
        noise: (m, k) variance over new labels at the same inputs.
        design: (m, k) variance over new inputs: what the model cannot represent pulls it elsewhere for each draw of
            inputs. Below zero by chance where there is none.
        sources: what was found for each training example.

    Examples:
        >>> of_examples = Sources(torch.ones(3, 1, 1), torch.zeros(3, 1, 1), anchors=3, lengths=(1.0,), nuggets=(1e9,))
        >>> one = torch.ones(1, 1)
        >>> Split(hec3=5 * one, noise=3 * one, design=one, sources=of_examples).design_share.tolist()
        [0.25]
    """

    experimental: ClassVar[bool] = True

    hec3: Tensor
    noise: Tensor
    design: Tensor
    sources: Sources

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.hec3)

    @property
    def remainder(self) -> Tensor:
        """(m, k) what HeC3 has beside the parts: leave-one-out residuals are larger than noise, and not centred."""
        return self.hec3 - self.noise - self.design

    @property
    def design_share(self) -> Tensor:
        """(m,) design part over noise part plus design part, summed over outputs; between zero and one."""
        design, noise = self.design.sum(1).clamp_min(0.0), self.noise.sum(1).clamp_min(0.0)
        both = design + noise
        return torch.where(both > 0, design / both.clamp_min(torch.finfo(both.dtype).tiny), 0.0)

    def to_frame(self) -> pandas.DataFrame:
        """One row a prediction, summed over outputs."""
        names = ("hec3", "noise", "design", "remainder")
        columns: dict[str, list[Tensor | list[str]]] = {name: [getattr(self, name).sum(1)] for name in names}
        return frame({**columns, "design_share": [self.design_share]})

    def __repr__(self) -> str:
        """Sizes and shares."""
        whole = max(float(self.hec3.sum()), torch.finfo(self.hec3.dtype).tiny)
        names = ("noise", "design", "remainder")
        shares = {name: round(100 * float(getattr(self, name).sum()) / whole) for name in names}
        parts = ", ".join(f"{name} {share}%" for name, share in shares.items())
        return f"Split({len(self)} predictions; of their HeC3 {parts}; experimental)"

    def _table(self) -> Table:
        rows, more = rows_shown(len(self), "to_frame()")
        named = {"HeC3": "hec3", "noise": "noise", "design": "design", "remainder": "remainder"}
        columns = [places(rows)]
        columns += [Column(name, numbers(getattr(self, key).sum(1)[:rows].tolist())) for name, key in named.items()]
        shares = self.design_share[:rows].tolist()
        columns.append(Column("design share", tuple(f"{share:.0%}" for share in shares), bars=tuple(shares)))
        note = "Noise: new labels would change it. Design: new inputs would. Experimental: see docs/sources.md."
        return Table(f"{count(len(self), 'prediction')}: HeC3 in parts", tuple(columns), f"{note}\n{more}".strip())


def split(fitted: Fitted, inputs: Inputs, sources: Sources) -> Split:
    """Split the HeC3 of one batch; see `Tracer.split`."""
    problem = fitted.problem
    most = max(1, int(0.1 * problem.budget.limit) // (8 * problem.n * problem.k**2))
    size = batch_size(inputs, "this batch")
    parts = []
    for low in range(0, size, most):
        some = take(inputs, slice(low, min(low + most, size)))
        for where, chunks in alignments(fitted, some):
            sums = problem.outputs.new_zeros(4, where.stop - where.start, problem.seen(inputs))
            for there, aligned in chunks:
                sums += _sums(fitted, aligned, there, sources)
            parts.append(sums)
    hec3, noise, design, shift = torch.cat(parts, 1)
    return Split(hec3, noise, design - shift.square() / fitted.meats.deletions, sources)


def join(parts: Sequence[Split]) -> Split:
    """Several batches as one."""
    hec3, noise, design = (torch.cat([getattr(part, name) for part in parts]) for name in ("hec3", "noise", "design"))
    return Split(hec3, noise, design, parts[0].sources)


def _sums(fitted: Fitted, aligned: Tensor, there: slice, sources: Sources) -> Tensor:
    """HeC3, noise, design and sum_i a_i u_i over some training examples, (4, m, k)."""
    weights = fitted.problem.sample_weights
    counts = 1.0 if weights is None else weights[there].to(aligned.dtype).square().reshape(-1, 1, 1)
    left_out = fitted.meats.roots["hec3"][there]
    hec3 = torch.einsum("mkni,niq->mknq", aligned, left_out).square().sum((2, 3))
    shift = torch.einsum("mkni,ni->mk", aligned, fitted.meats.total[there])
    quadratic = [
        torch.einsum("mkni,nij,mknj->mk", aligned, counts * matrices[there], aligned)
        for matrices in (sources.noise, sources.design)
    ]
    return torch.stack([hec3, *quadratic, shift])
