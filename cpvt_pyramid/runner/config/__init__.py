"""Configs: load them, check them before a run, report settings without an effect, and explain
exceptions by the part of the config that was being built or called."""
