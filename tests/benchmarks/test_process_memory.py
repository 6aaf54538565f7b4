"""Memory that a process takes."""

import sys

from support import ROOT, run

IN_A_PROCESS = """
from benchmarks import process_memory

MIB = 2**20
process_memory.restart_peak()
before = process_memory.resident()
block = bytearray(64 * MIB)
assert process_memory.resident() - before > 48 * MIB
del block
assert process_memory.peak() - before > 48 * MIB
process_memory.restart_peak()
assert process_memory.peak() < before + 32 * MIB
"""


def test_what_a_process_takes():
    """In one of its own: threads of other tests take memory meanwhile."""
    done = run(sys.executable, '-c', IN_A_PROCESS, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
