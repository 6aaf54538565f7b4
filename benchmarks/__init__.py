"""What we measure: `python -m benchmarks.speed --help`, for example, in the checkout.

A module with a `main` is a command. `tests/models` has models of other libraries, for both.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the checkout
