"""Configs: load them, check them before a run, plan and apply what a tool changes in them, and end
an exception in one line."""
