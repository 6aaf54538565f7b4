"""What can be wrong with a checkpoint: names that are no names of ours, values that cannot load."""

import math

import torch
from torch import Tensor

NAMES = (
    '',
    '.',
    'blocks',
    'blocks.',
    'blocks.0',
    'blocks.x.0.mlp.fc1.weight',
    'patch_embeds',
    'patch_embeds.9.proj.weight',
    'levels',
    'norm',
    'head',
    'head.',
    'pos_block',
    'module.',
    'backbone.',
    '_orig_mod.',
    'layers.0.0.norm1.weight',
    'layers.0.1.1.',
    'blocks.0.0.attn.attn.in_proj_weight',
    'a' * 10_000,
    '\N{SNOWMAN}',
    'blocks.\N{SUPERSCRIPT TWO}.0.norm1.weight',
    3,
    None,
    ('blocks', 0),
    2.5,
    b'blocks',
)


def nan_in(value: Tensor) -> Tensor:
    value = value.clone()
    value.view(-1)[value.numel() // 2] = math.nan
    return value


# Values that cannot be loaded, from a good one.
BAD = {
    'scalar': lambda v: torch.tensor(1.0),
    'empty': lambda v: torch.empty(0),
    'a side more': lambda v: torch.cat([v, v]),
    'a dimension more': lambda v: v[None],
    'flat': lambda v: v.reshape(-1) if v.dim() > 1 else v[:, None],
    'nan': nan_in,
    'infinite': lambda v: v * math.inf,
    'int': lambda v: v.long(),
    'complex': lambda v: v.to(torch.complex64),
    'float8': lambda v: v.to(torch.float8_e4m3fn),
    'sparse': lambda v: v.to_sparse(),
    'quantized': lambda v: torch.quantize_per_tensor(v, 0.1, 0, torch.qint8),
    'meta': lambda v: v.to('meta'),
    'stride 0': lambda v: torch.zeros(1).expand(2**45),
    'stride 0, 4-D': lambda v: torch.zeros(1, 1, 1, 1).expand(2**15, 2**15, 2**10, 2**5),
    'none': lambda v: None,
    'text': lambda v: 'weights',
}
