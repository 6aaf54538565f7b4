"""What the processor is."""

import functools
import platform
import re
from pathlib import Path

import torch


@functools.cache
def processor() -> tuple[str, int]:
    """Vendor and family of the processor, such as ('AuthenticAMD', 26); ('', 0) if unknown."""
    try:
        text = Path('/proc/cpuinfo').read_text(errors='replace')
        vendor = re.search(r'^vendor_id\s*: (\w+)', text, re.MULTILINE)
        family = re.search(r'^cpu family\s*: (\d+)', text, re.MULTILINE)
    except OSError:  # not Linux; Windows says 'AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD'
        text = platform.processor()
        vendor = re.search(r', (\w+)', text)
        family = re.search(r'Family (\d+)', text)
    if not vendor or not family:
        return '', 0
    return vendor[1], int(family[1])


@functools.cache
def mkl_is_slow() -> bool:
    """True if MKL, which PyTorch's float32 products use, takes twice as long as oneDNN.

    That was measured on AMD's Zen 5 (family 26), where MKL uses half of the width of AVX-512. On
    AMD's Zen 4 (family 25) MKL takes 1.1 to 1.2 times as long. Other vendors' processors and newer
    families are treated as Zen 4; they were not measured.

    A measurement at the start of each process would decide differently on a busy machine, so that
    the last bits of results would differ from run to run.
    """
    return processor() == ('AuthenticAMD', 26)


@functools.cache
def multiplies_bfloat16() -> bool:
    """True if oneDNN has products in bfloat16 for this processor."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def has_amx() -> bool:
    """True if the processor multiplies matrices in bfloat16 (AMX)."""
    return torch.cpu._is_amx_tile_supported()


@functools.cache
def fused_attention_is_slow(dtype: torch.dtype) -> bool:
    """True if products of oneDNN are faster than PyTorch's fused kernel for attention, at least for
    its gradient.

    The fused kernel multiplies blocks of queries and keys. In float32 MKL does that. In bfloat16 it
    is fast with AMX, for which the kernel packs the keys and values once; without it, each product
    of blocks is a call of its own, and takes three times as long (Zen 5). In float32 on Zen 4 the
    fused kernel takes 0.7 to 0.95 of oneDNN's time.
    """
    if dtype == torch.bfloat16:
        return not has_amx()
    return mkl_is_slow()
