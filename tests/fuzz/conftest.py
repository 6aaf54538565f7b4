"""Fuzzing: a short run in `make test`, a long one in `make fuzz`, with CPVT_FUZZ cases a test."""

import os

from hypothesis import HealthCheck, settings

EXAMPLES = os.environ.get('CPVT_FUZZ')

# Not fixed in the long run, so that every run tries others; the failing ones are kept.
settings.register_profile(
    'fuzz',
    max_examples=int(EXAMPLES or 25),
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
