"""`python -m whence` is the command `whence`."""

from whence.cli import main

main()
