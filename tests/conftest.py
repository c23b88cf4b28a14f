"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Test machines are shared and stall: how long one example takes says nothing.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
