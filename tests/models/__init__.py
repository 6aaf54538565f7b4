"""Models for tests, benchmarks and experiments: small ones of ours, and other libraries'."""
