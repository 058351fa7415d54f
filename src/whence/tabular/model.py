"""A network with all it needs to read rows of a table: columns, target, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from whence.errors import InputError
from whence.tabular import columns as kinds_of_columns
from whence.tabular.columns import Column
from whence.tabular.kinds import Left, encoded
from whence.tabular.network import build, weights_of
from whence.tabular.reading import Table
from whence.tabular.targets import Target


@dataclass(frozen=True)
class TableModel:
    """How rows become inputs, and outputs predictions.

    Attributes:
        columns: those that are used.
        left: those that are not, and why.
        target: what is predicted.
        width: of the hidden layers.
    """

    columns: tuple[Column, ...]
    left: tuple[Left, ...]
    target: Target
    width: int

    @property
    def inputs(self) -> list[str]:
        """Names of the network's inputs."""
        return [name for column in self.columns for name in column.inputs]

    @property
    def weights(self) -> int:
        """Number of the network's weights."""
        return weights_of(len(self.inputs), self.width, self.target.outputs)

    @property
    def identifiers(self) -> list[str]:
        """Columns that only name the rows."""
        return [left.name for left in self.left if left.identifier]

    def network(self) -> nn.Sequential:
        """The network, without its weights."""
        return build(len(self.inputs), self.width, self.target)

    def encode(self, table: Table) -> Tensor:
        """(m, inputs) the rows of a table."""
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            shown = ", ".join(map(repr, absent[:8])) + (", ..." if len(absent) > 8 else "")
            raise InputError(
                f"expected the columns that the network was trained with, got none named {shown}. "
                f"Columns there are: {', '.join(list(table.columns)[:20])}."
            )
        return torch.from_numpy(encoded(list(self.columns), table.columns))

    def strange(self, table: Table) -> list[str]:
        """What training never saw in a column, in words."""
        notes = []
        for column in self.columns:
            cells = table.columns[column.name]
            odd = column.strange(cells)
            if odd.any():
                shown = ", ".join(repr(str(cell)) for cell in list(dict.fromkeys(cells[odd]))[:3])
                what = "a category that training never had" if column.kind == "category" else f"no {column.kind}"
                notes.append(f"{column.name!r} holds {what} in {int(odd.sum())} of {len(odd)} rows, such as {shown}")
        return notes

    def targets(self, table: Table) -> Any:
        """(m,) as numbers, NaN where there is none; all NaN where the table has no such column."""
        if self.target.name not in table.columns:
            return numpy.full(len(table), numpy.nan)
        return self.target.read(table.columns[self.target.name])

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "columns": [kinds_of_columns.to_json(column) for column in self.columns],
            "left": [left._asdict() for left in self.left],
            "target": self.target.to_json(),
            "width": self.width,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TableModel:
        """Back from JSON."""
        return cls(
            columns=tuple(kinds_of_columns.from_json(column) for column in fields["columns"]),
            left=tuple(Left(**left) for left in fields["left"]),
            target=Target.from_json(fields["target"]),
            width=int(fields["width"]),
        )
