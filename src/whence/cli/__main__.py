"""`python -m whence.cli` is the command `whence`."""

from whence.cli import main

main()
