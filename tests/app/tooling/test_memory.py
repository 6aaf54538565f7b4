"""Memory that a process can still take."""

import psutil
import pytest

from cpvt_pyramid.app.tooling import memory


@pytest.mark.parametrize(
    'limit, anonymous, expected',
    [(3000, 1000, 2000), (10**18, 1000, None), ('max', 1000, None), (3000, None, None)],
)
def test_a_container_has_the_memory_of_its_limit(limit, anonymous, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, 'GROUP', tmp_path)
    (tmp_path / 'memory.max').write_text(f'{limit}\n')
    if anonymous is not None:
        (tmp_path / 'memory.stat').write_text(f'anon {anonymous}\nfile 7\nanon_thp 5\n')
    if expected is not None:
        assert memory.available() == expected
    else:
        assert memory.available() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_a_process_has_the_memory_of_its_address_space(monkeypatch):
    taken = psutil.Process().memory_info().vms
    monkeypatch.setattr(memory, 'address_limit', lambda: taken + 10**9)
    assert memory.available() == pytest.approx(10**9, rel=0.2)
    monkeypatch.setattr(memory, 'address_limit', lambda: taken // 2)
    assert memory.available() == 0


@pytest.mark.parametrize(
    'line, expected',
    [
        ('could not create a primitive', True),
        ('could not execute a primitive', True),
        ('could not create a primitive descriptor for a convolution forward', False),
        ('could not create a memory descriptor for a tensor', False),
    ],
)
def test_how_onednn_says_that_memory_ended(line, expected):
    """It has no descriptor for operations that it does not support."""
    assert memory.is_exhausted(RuntimeError(line)) == expected
