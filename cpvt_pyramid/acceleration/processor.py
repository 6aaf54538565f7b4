"""What the processor is."""

import functools

import torch


@functools.cache
def multiplies_bfloat16() -> bool:
    """True if oneDNN has products in bfloat16 for this processor."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def line_about_bfloat16(device: str = 'cpu') -> str:
    """That bfloat16 is slow on a type of device, this processor; empty if it is not."""
    if device != 'cpu' or multiplies_bfloat16():
        return ''
    return 'this processor does not multiply bfloat16: PyTorch takes about 10 times as long in it'


@functools.cache
def has_avx512() -> bool:
    """True if PyTorch computes with AVX-512."""
    return torch.backends.cpu.get_cpu_capability().startswith('AVX512')


@functools.cache
def prefers_mkl() -> bool:
    """True if MKL, where PyTorch has it, multiplies float32 faster than oneDNN.

    Without AVX-512 it does so in 0.8 to 0.9 of the time, and oneDNN's GELU takes longer than
    PyTorch's (Zen 3).
    """
    return torch.backends.mkl.is_available() and not has_avx512()


@functools.cache
def has_amx() -> bool:
    """True if the processor multiplies matrices in bfloat16 (AMX), and this PyTorch knows of it."""
    is_supported = getattr(torch.cpu, '_is_amx_tile_supported', None)
    return is_supported is not None and is_supported()
