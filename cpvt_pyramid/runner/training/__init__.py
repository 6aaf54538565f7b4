"""Checkpoints, resuming, logs, schedules and sharding."""
