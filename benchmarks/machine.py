"""The machine of a measurement: its name, and the rates that bound a step from below."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch

from benchmarks.measuring import MIB, least_seconds, torch_dtype
from cpvt_pyramid.tooling.threads import usable_cores


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


def machine_rates(device: str, dtype: str) -> dict[str, float]:
    """Rates of matrix products, in GFLOP/s, and of a copy of 256 MiB, in GB/s read and written.

    The products are a large square one and one of the first stage's shape, 16384 tokens from 64 to
    512 channels; by torch and, on a CPU, by oneDNN called directly.
    """
    large = 8192 if device.startswith('cuda') else 2048
    options = dict(device=device, dtype=torch_dtype(dtype))
    products = {'torch': torch.nn.functional.linear}
    if device == 'cpu' and torch.backends.mkldnn.is_available() and dtype != 'float16':
        products['oneDNN'] = lambda x, weight: torch.ops.mkldnn._linear_pointwise(
            x, weight, None, 'none', [], ''
        )
    shapes = {'square': (large, large, large), 'tall': (16384, 64, 512)}
    rates = {}
    with torch.inference_mode():
        for shape, (m, k, n) in shapes.items():
            x = torch.randn(m, k, **options)
            weight = torch.randn(n, k, **options)
            for library, product in products.items():
                seconds = least_seconds(functools.partial(product, x, weight))
                rates[f'{shape}, {library}'] = 2 * m * k * n / seconds / 1e9
        source = torch.zeros(256 * MIB, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        seconds = least_seconds(functools.partial(target.copy_, source))
        rates['copy'] = 2 * source.numel() / seconds / 1e9
    return rates


def floor(row: dict, rates: dict[str, float]) -> float:
    """Lower bound of a step in seconds, from the counted work and the highest measured rates."""
    best = max(rate for name, rate in rates.items() if name != 'copy')
    return max(2 * row['gflops'] / best, row['gbytes'] / rates['copy'])


def rates_line(dtype: str, rates: dict[str, float]) -> str:
    texts = [f'{name} {rate:.0f}' for name, rate in rates.items() if name != 'copy']
    return f'{dtype} products in GFLOP/s: {"; ".join(texts)}. Copy: {rates["copy"]:.1f} GB/s'
