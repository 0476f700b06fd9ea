"""Settings of the pure tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Two busy cores make any deadline for one example a source of false alarms; pytest-timeout bounds the whole test.
settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")
