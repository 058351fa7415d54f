"""The experiments of the paper behind `whence`, run with its public names only."""
