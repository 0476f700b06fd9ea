"""Waiting for a call of Ray, with a bound, in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(reference: Awaitable[T], limit_s: float) -> T:
    """What a call gives.

    Not ``asyncio.wait_for``: up to Python 3.11 that drops a cancellation that comes together with the result, and a
    loop that should have ended would go on, renewing the leases of workers that were given up.

    Args:
        reference: Ray's, to the call's result.
        limit_s: seconds.

    Raises:
        asyncio.TimeoutError: not within ``limit_s``.
        Exception: what the call raised.
    """
    task = asyncio.ensure_future(_wrap(reference))
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
    if not done:
        raise asyncio.TimeoutError(f"no answer within {limit_s:.1f} s")
    return task.result()  # it is done: this does not wait


async def _wrap(reference: Awaitable[T]) -> T:
    return await reference
