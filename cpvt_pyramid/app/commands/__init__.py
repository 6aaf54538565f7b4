"""The commands: signatures and docstrings, nothing else."""
