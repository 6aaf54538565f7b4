"""Models of other libraries, for the tests and the benchmarks."""
