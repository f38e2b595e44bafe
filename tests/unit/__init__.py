"""Tests of single modules.

Properties have no time limit per example: on a busy machine it would fail tests for being slow.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("relay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("relay")
