"""A faster path that can be taken out of use, to be held against the one that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Switch:
    """On, but within `off`."""

    def __init__(self) -> None:
        self.on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it the switch is off; nesting changes nothing."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before
