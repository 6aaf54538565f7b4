"""What we measure: `python -m benchmarks.speed --help`, for example, in the checkout.

A module with a `main` is a command. `models` has models of other libraries, also for the tests.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the checkout
