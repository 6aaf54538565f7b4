"""Show what is installed and whether it works, and how to fix what does not."""

from ..doctor import main as main
