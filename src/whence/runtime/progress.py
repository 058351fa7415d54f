"""A progress line with the time left, shown only for work that lasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")


class Progress:
    """Shows `label: done/total, time left` on one line of a terminal, once a task has lasted over a second.

    Away from a terminal (a log file, a pipe) a line is written at most every ten seconds.

    Args:
        enabled: `False` shows nothing.
        stream: where to write; standard error by default.
    """

    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.enabled = enabled
        self._stream = stream

    def track(
        self, items: Iterable[T], label: str, total: int | None = None, tokens: Callable[[T], int] = lambda _: 0
    ) -> Iterator[T]:
        """Yield `items`, showing how far along they are, and how many `tokens` a second where they have any.

        Examples:
            >>> list(Progress(enabled=False).track([1, 2], "counting"))
            [1, 2]
        """
        stream = self._stream or sys.stderr
        if not self.enabled or stream is None:  # a program without a console has no standard error
            yield from items
            return
        interactive = stream.isatty()
        pause = 0.1 if interactive else 10.0
        start = shown_at = time.monotonic()
        shown = False
        done = read = 0
        try:
            for item in items:
                count = tokens(item)
                yield item
                done, read = done + 1, read + count
                now = time.monotonic()
                if now - start > 1.0 and now - shown_at > pause:
                    line = describe(label, done, total, now - start, read)
                    stream.write(f"\r\x1b[2K{line}" if interactive else f"{line}\n")
                    stream.flush()
                    shown, shown_at = True, now
        finally:
            if shown and interactive:
                stream.write("\r\x1b[2K")
                stream.flush()

    def say(self, line: str) -> None:
        """Write a line of its own."""
        stream = self._stream or sys.stderr
        if self.enabled and stream is not None:
            stream.write(f"{line}\n")
            stream.flush()


def describe(label: str, done: int, total: int | None, elapsed: float, tokens: int = 0) -> str:
    """One line of progress.

    Examples:
        >>> describe("curvature, batch", 5, 20, 10.0)
        'whence: curvature, batch 5 of 20, 10 s, 30 s left'
        >>> describe("curvature, batch", 5, None, 10.0, 40_960)
        'whence: curvature, batch 5, 10 s, 4,096 tokens a second'
    """
    speed = f", {tokens / elapsed:,.0f} tokens a second" if tokens else ""
    if total is None or done == 0:
        return f"whence: {label} {done}, {clock(elapsed)}{speed}"
    left = elapsed / done * max(total - done, 0)
    return f"whence: {label} {done} of {total}, {clock(elapsed)}, {clock(left)} left{speed}"


def clock(seconds: float) -> str:
    """Seconds for people.

    Examples:
        >>> clock(42), clock(125), clock(7300)
        ('42 s', '2 min 05 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
