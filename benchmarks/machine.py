"""The machine of a measurement."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from cpvt_pyramid.app.tooling.threads import usable_cores


def machine(device: str) -> dict:
    """The machine that the numbers are from."""
    cuda = device.startswith('cuda')
    return dict(
        processor=torch.cuda.get_device_name(device) if cuda else processor(),
        cores=usable_cores(),
        system=platform.platform(),
        torch=torch.__version__,
    )


def processor() -> str:
    """The processor's name; many virtual machines hide the model, but not its numbers."""
    try:
        lines = Path('/proc/cpuinfo').read_text().partition('\n\n')[0].splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    found = {}
    for line in lines:
        key, _, value = line.partition(':')
        found[key.strip()] = value.strip()
    numbers = [f'{key} {found[key]}' for key in ('cpu family', 'model') if key in found]
    return ', '.join([found.get('model name', platform.machine()), *numbers])
