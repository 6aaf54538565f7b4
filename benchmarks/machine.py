"""The machine of a measurement."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from benchmarks import ROOT
from cpvt_pyramid.app.tooling.threads import usable_cores


def machine(device: str) -> dict:
    """The machine that the numbers are from."""
    cuda = device.startswith('cuda')
    return dict(
        processor=torch.cuda.get_device_name(device) if cuda else processor(),
        cores=usable_cores(),
        system=f'{platform.system()} {platform.machine()}',
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


def version() -> dict[str, str]:
    """The commit that is measured, and the versions of the libraries that it is compared with."""
    commands = (['rev-parse', '--short=8', 'HEAD'], ['status', '--porcelain', '-uno'])
    commit, changes = (git(*command) for command in commands)
    found = {'commit': f'{commit} with changes' if changes else commit}
    for package in ('timm', 'openvino'):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git(*arguments: str) -> str:
    done = subprocess.run(['git', *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or ('unknown' if done.returncode else '')
