"""Data sets: readers of a folder given with --data, or of the public sources, kept in a cache and checked."""

from .images import Images, read_images
from .tables import Bank, Housing, read_bank, read_california

__all__ = ["Bank", "Housing", "Images", "read_bank", "read_california", "read_images"]
