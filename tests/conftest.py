"""Settings of all tests: those with Hypothesis (the environment of vLLM has none), and Ctrl-C."""

from __future__ import annotations

import contextlib
import signal

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # Two busy cores make any deadline for one example a source of false alarms; pytest-timeout bounds the whole test.
    settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("all")

# A shell starts what it puts in the background with SIGINT ignored, and so would every script be that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
