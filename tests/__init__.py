"""Tests, laid out like the package. `models/` is also for benchmarks and experiments."""
