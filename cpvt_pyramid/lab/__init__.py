"""Probes of where a model knows about position, for any model that returns maps."""
