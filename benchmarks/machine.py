"""The machine of a measurement."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from benchmarks import ROOT
from cpvt_pyramid.app.tooling.threads import usable_cores

# Vendor, family and models in /proc/cpuinfo, as in Linux's arch/x86/kernel/cpu/amd.c and
# arch/x86/include/asm/intel-family.h.
GENERATIONS = (
    ('AuthenticAMD', 25, (range(0x00, 0x10), range(0x20, 0x60)), 'Zen 3'),
    ('AuthenticAMD', 25, (range(0x10, 0x20), range(0x60, 0xB0)), 'Zen 4'),
    ('AuthenticAMD', 26, (range(0x00, 0x30), range(0x40, 0x50), range(0x60, 0x80)), 'Zen 5'),
    ('GenuineIntel', 6, (range(0x8F, 0x90),), 'Sapphire Rapids'),
    ('GenuineIntel', 6, (range(0xCF, 0xD0),), 'Emerald Rapids'),
)


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
        text = Path('/proc/cpuinfo').read_text()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return processor_name(text)


def processor_name(cpuinfo: str) -> str:
    """The processor's name in the text of /proc/cpuinfo, with its generation if that is known."""
    found = {}
    for line in cpuinfo.partition('\n\n')[0].splitlines():
        key, _, value = line.partition(':')
        found[key.strip()] = value.strip()
    name = found.get('model name', platform.machine()).replace('(R)', '')
    for vendor, family, models, generation in GENERATIONS:
        is_vendor = (found.get('vendor_id'), found.get('cpu family')) == (vendor, str(family))
        if is_vendor and any(int(found.get('model', -1)) in known for known in models):
            return f'{name} ({generation})'
    numbers = [f'{key} {found[key]}' for key in ('cpu family', 'model') if key in found]
    if 'amx_tile' in found.get('flags', '').split():  # which the numbers of a machine may deny
        numbers.append('with AMX')
    return ', '.join([name, *numbers])


def version() -> dict[str, str]:
    """The commit that is measured, and the versions of the libraries that it is compared with."""
    code = ('cpvt_pyramid', 'benchmarks/*.py')
    commands = (
        ['rev-parse', '--short=8', 'HEAD'],
        ['status', '--porcelain', '-uno', '--', *code],
    )
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
