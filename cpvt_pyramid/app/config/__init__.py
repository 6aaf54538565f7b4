"""Configs: load them, read what they name, and check them before a run."""
