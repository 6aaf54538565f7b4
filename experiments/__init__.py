"""Experiments whose results the documentation states; they run in a checkout, on a CPU.

    python -m experiments.position encodings     # docs/position.md
    python -m experiments.position paper         # the CPVT paper's own experiment, same page
    python -m experiments.unpadded               # docs/invariance.md and the README

`runs` trains, `report` writes what was found, `statistics` and `figures` are what both need.
"""
