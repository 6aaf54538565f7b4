"""Show what is installed, whether it works, and a command that fixes the rest."""

from ..doctor import main as main

GROUP = 'installation'
