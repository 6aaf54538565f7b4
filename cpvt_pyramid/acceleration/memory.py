"""Memory that a process keeps."""

import torch

# The largest block that glibc learns from is 32 MiB. What PyTorch asks for is a little more than a
# tensor.
LARGEST = 2**25 - 2**14


def keep_freed_memory() -> None:
    """Let this process keep blocks of up to 32 MiB that it frees, for the next maps.

    glibc returns large blocks to the operating system at once, and asks for others for the next
    map. The first access to each page of these takes longer than a product that fills it. After a
    block is freed, glibc keeps blocks of its size (`mallopt(3)`, M_MMAP_THRESHOLD): one of the
    largest size is enough. Nothing is written to it. Other allocators take no notice.
    """
    torch.empty(LARGEST, dtype=torch.uint8, device='cpu')
