"""The command `cpvt` of this checkout, which need not be installed; for the other files here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpvt_pyramid.__main__ import main as main  # noqa: E402
