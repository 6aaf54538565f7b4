"""What do models that are trained without padding lose in padded batches?

`python -m experiments.unpadded` is the command line. `models` builds small detectors and segmentors
from the package's configs, `runs` trains and tests them, `report` makes the tables and the figure
of experiments/unpadded/findings/unpadded.md.
"""
