"""The demonstration: can `whence` tell noisy labels from missing data? Run `python -m whence_paper.demo`.

The same as `whence demo`. Nothing but the command line is imported here, so that a missing extra is told in a sentence.
"""

import sys

from whence.cli import main

if __name__ == "__main__":
    main(["demo", *sys.argv[1:]])
