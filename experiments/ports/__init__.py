"""Is a trained detector or segmentor better for it? Ports of PCPVT compared by training.

`python -m experiments.ports` is the command line. `runs` trains a small detector and segmentor and
evaluates it alone and in padded batches, `report` makes the tables and the figure of
experiments/ports/findings/training.md.
"""
