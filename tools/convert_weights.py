#!/usr/bin/env python
"""Convert a checkpoint to another format.

It writes STEM_FORMAT-HASH.pth, the hash being the first 8 digits of the content's SHA-256, after
it has loaded the result and found the same outputs. Of a detector or segmentor, the backbone is
converted and the rest left out; a classifier keeps its head.
"""

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Union

if TYPE_CHECKING:
    from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

# The formats of `cpvt_pyramid.weights`. official and timm: that of the model's authors and timm.
FORMATS = (
    'ours', 'official', 'timm', 'mmseg', 'mmpretrain', 'mmdet', 'pvt', 'mmpretrain_vit', 'vit',
)  # fmt: skip


def convert_weights(
    source: Union[str, Path],
    to: str,
    out: Union[str, Path] = '.',
    backbone_only: bool = False,
    safetensors: bool = False,
) -> Path:
    """Write a checkpoint in another format; returns the path of the new file.

    Args:
        source: the checkpoint, in any format that `cpvt_pyramid.weights` reads.
        to: the format, one of `FORMATS`.
        out: folder for the new file.
        backbone_only: leave the classifier out, too.
        safetensors: write a `.safetensors` file; else a `.pth` file.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is not whole, of no model that has a name, or the format has no place for
            the architecture.
    """
    from cpvt_pyramid import weights

    found = weights.tensors_of(weights.read_checkpoint(source))
    ours = weights.to_ours(found)
    model = model_of(ours)
    if backbone_only:
        ours = {k: v for k, v in ours.items() if not weights.CLASSIFIER.match(k)}
    key = to if to in ('ours', *weights.FORMATS) else published_format(ours)
    if to == 'timm' and key == 'pvt':
        raise ValueError("timm has no PVT; the names of its authors are 'official'")
    # A tensor of its own for each: the parts of a split one share their memory.
    tensors = {k: v.clone().contiguous() for k, v in weights.to_format(ours, key).items()}

    suffix = '.safetensors' if safetensors else '.pth'
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.convert-', dir=folder) as scratch:
        partial = Path(scratch, 'partial' + suffix)
        write(tensors, partial)
        check(model, found, ours, weights.read_checkpoint(partial))
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        path = folder / f'{Path(source).stem}_{to}-{digest[:8]}{suffix}'
        if not path.exists():
            os.replace(partial, path)
            print(f'wrote {path}')
        elif path.read_bytes() == partial.read_bytes():
            print(f'{path} is there already')
        else:
            raise ValueError(f'{path} is there, with another content')
    return path


def published_format(ours: dict[str, 'Tensor']) -> str:
    """The format in which the authors of a model publish it."""
    if 'pos_embeds.0.table' in ours:
        return 'pvt'
    return 'vit' if 'pos_embed.table' in ours else 'ours'


def write(tensors: dict[str, 'Tensor'], path: Path) -> None:
    if path.suffix == '.safetensors':
        from safetensors.torch import save_file

        save_file(tensors, path, metadata={'format': 'pt'})
    else:
        import torch

        torch.save(tensors, path)


def check(
    model: 'nn.Module', found: dict[str, 'Tensor'], ours: dict[str, 'Tensor'], written: dict
) -> None:
    """See that a file holds every tensor of the source, and gives the same outputs.

    Args:
        model: what to load them into.
        found: the tensors of the source, as they were.
        ours: the same, under our names.
        written: the content of the file.
    """
    import torch

    from cpvt_pyramid.weights import tensors_of, to_ours

    again = to_ours(tensors_of(written))
    for name in ours.keys() | again.keys():
        if name not in ours or name not in again or not same(ours[name], again[name]):
            raise ValueError(f'the conversion does not keep {name}')
    image = torch.randn(1, 3, 64, 64)[:, :1].repeat(1, model.in_channels, 1, 1)
    outputs = []
    for tensors in (found, written):
        model.load_state_dict(tensors, strict=False)
        with torch.inference_mode():
            out = model(image)
        outputs.append(out if isinstance(out, tuple) else (out,))
    if not all(map(torch.equal, *outputs)):
        raise ValueError('the converted weights give other outputs')


def same(a: 'Tensor', b: 'Tensor') -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def model_of(ours: dict[str, 'Tensor']) -> 'nn.Module':
    """The model that has these tensors, under our names."""
    from cpvt_pyramid import CPVT, CPVTPyramid
    from cpvt_pyramid.weights import arch_of, listed, shape_of

    arch = arch_of(ours)
    if arch is None:
        raise ValueError(f'no model of a known name has these tensors: {listed(list(ours))}')
    stages = shape_of(ours)
    table = ours.get('pos_embeds.0.table', ours.get('pos_embed.table'))
    pegs = sorted({int(name.split('.')[1]) for name in ours if name.startswith('pos_block.')})
    kinds = ['learned'] * (table is not None) + ['peg'] * bool(pegs)
    options = dict(
        position='+'.join(kinds) or 'none',
        pretrain_img_size=224 if table is None else (4 if stages else 16) * table.shape[1],
    )
    if stages:
        model = CPVTPyramid(
            arch,
            **options,
            in_channels=ours['patch_embeds.0.proj.weight'].shape[1],
            out_indices=range(len(stages)),
            stage_norm='norm_list.0.weight' in ours,
        )
    else:
        model = CPVT(
            arch,
            **options,
            peg=dict(after=pegs) if pegs else None,
            class_token='cls_token' in ours,
            num_classes=len(ours.get('head.bias', range(1000))),
        )
    return model.eval()


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog='convert_weights',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('source', metavar='SOURCE', help='a .pth or .safetensors file in any of the formats')
    add(
        '--to',
        required=True,
        choices=FORMATS,
        help="the format; official and timm are the names of Twins' authors, and ours",
    )
    add('--out', metavar='DIR', default='.', help='folder to write to (%(default)s)')
    add('--backbone-only', action='store_true', help="leave a classifier's head out")
    add('--safetensors', action='store_true', help='write a .safetensors file')
    arguments = vars(parser.parse_args(argv))
    try:
        convert_weights(**arguments)
    except (ValueError, OSError) as error:
        print(f'convert_weights: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
