"""Models of other libraries, and data for them: for benchmarks and tests."""
