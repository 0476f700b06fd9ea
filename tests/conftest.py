"""Settings of all tests with Hypothesis; the environment of vLLM has none."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # Two busy cores make any deadline for one example a source of false alarms; pytest-timeout bounds the whole test.
    settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("all")
