"""Models of other libraries, and data for them: for benchmarks, experiments and tests."""
