"""A worker extension that stands in for the parts of CUDA that a runner's asynchronous path touches.

It is imported in the workers before they make their runner, and for that alone: nothing else may import it.
"""

from __future__ import annotations

from typing import Any

import torch


class Nothing:
    """An event that has happened, or a stream with nothing in it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *_: Any) -> None:
        """It has."""

    def synchronize(self) -> None:
        """It is."""

    def wait_stream(self, _: Any) -> None:
        """There is nothing to wait for."""


torch.cuda.Event = torch.cuda.Stream = Nothing
torch.cuda.current_stream = lambda *_: Nothing()


class Streams:
    """Named as the extension."""
