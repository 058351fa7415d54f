"""What structures made of layers' gradients have in common."""

from __future__ import annotations

from typing import ClassVar, Literal

from whence.curvature.base import Structure


class OfSums(Structure):
    """A structure whose passes over the data are sums, and whose answers stay the same with rounded products."""

    tf32: ClassVar[bool] = True

    @property
    def in_parts(self) -> bool:
        """Yes: all passes are sums."""
        return True


class OfLayers(OfSums):
    """Layers are apart, and leverages approximate."""

    policy: ClassVar[Literal["exact", "one_plus_q"]] = "one_plus_q"

    @property
    def by_layers(self) -> bool:
        """Yes: layers are apart."""
        return True


class OfFeatures(OfSums):
    """A few features of every example stand for its gradient."""

    @property
    def takes_groups(self) -> bool:
        """Yes: features of all examples are at hand."""
        return True
