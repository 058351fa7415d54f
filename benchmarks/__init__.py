"""Cost and quality of `whence`, measured; run the modules from the root of the repository."""
