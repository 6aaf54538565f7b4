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

# Formats of `cpvt_pyramid.weights`, and what else people call ours.
NAMES = ('ours', 'official', 'timm', 'mmseg', 'mmpretrain', 'mmdet', 'pvt')


def convert(
    source: Union[str, Path],
    to: str,
    out: Union[str, Path] = '.',
    backbone_only: bool = False,
    safetensors: bool = False,
) -> Path:
    """Write a checkpoint in another format; returns the path of the new file.

    Args:
        source: the checkpoint, in any format that `cpvt_pyramid.weights` reads.
        to: the format, one of `NAMES`.
        out: folder for the new file.
        backbone_only: leave the classifier out, too.
        safetensors: write a `.safetensors` file; else a `.pth` file.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is not whole, of no pyramid that has a name, or the format has no place for
            the architecture.
    """
    from cpvt_pyramid import weights

    found = weights.tensors_of(weights.read_checkpoint(source))
    ours = weights.to_ours(found)
    if backbone_only:
        ours = {k: v for k, v in ours.items() if not weights.CLASSIFIER.match(k)}
    if to in ('official', 'timm') and 'pos_embeds.0.table' in ours:
        raise ValueError(f"{to} is for PEG; the authors' names of PVT are 'pvt'")
    target = 'ours' if to in ('official', 'timm') else to
    # A tensor of its own for each: the parts of a split one share their memory.
    tensors = {k: v.clone().contiguous() for k, v in weights.to_format(ours, target).items()}
    print(f'{source}: {weights.arch_of(ours) or "?"}, {weights.format_of(found)} -> {to}')
    return publish(tensors, found, ours, f'{Path(source).stem}_{to}', Path(out), safetensors)


def publish(
    tensors: dict[str, 'Tensor'],
    found: dict[str, 'Tensor'],
    ours: dict[str, 'Tensor'],
    stem: str,
    folder: Path,
    safetensors: bool,
) -> Path:
    """Write tensors to a file, check the file and give it the name of its content.

    Args:
        tensors: what to write.
        found: the tensors of the source, as they were.
        ours: the same, under our names.
        stem: what the name begins with.
        folder: where to write, made if it is not there.
        safetensors: the kind of file.
    """
    import torch

    from cpvt_pyramid.weights import read_checkpoint

    suffix = '.safetensors' if safetensors else '.pth'
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.convert-', dir=folder) as scratch:
        partial = Path(scratch, 'partial' + suffix)
        if safetensors:
            from safetensors.torch import save_file

            save_file(tensors, partial, metadata={'format': 'pt'})
        else:
            torch.save(tensors, partial)
        check(read_checkpoint(partial), found, ours)
        path = folder / f'{stem}-{hashlib.sha256(partial.read_bytes()).hexdigest()[:8]}{suffix}'
        if not path.exists():
            os.replace(partial, path)
            print(f'wrote {path}')
        elif path.read_bytes() == partial.read_bytes():
            print(f'{path} is there already')
        else:
            raise ValueError(f'{path} is there, with another content')
    return path


def check(
    written: dict[str, 'Tensor'], found: dict[str, 'Tensor'], ours: dict[str, 'Tensor']
) -> None:
    """See that a file holds every tensor of the source, and gives the same outputs in a model."""
    import torch

    from cpvt_pyramid.weights import tensors_of, to_ours

    again = to_ours(tensors_of(written))
    wrong = [k for k in ours if k not in again or not same(ours[k], again[k])]
    if wrong or len(again) > len(ours):
        raise ValueError(f'the conversion would not keep {wrong or set(again) - set(ours)}')
    image = torch.randn(1, 3, 96, 96)
    with torch.inference_mode():
        for a, b in zip(model_of(ours, found)(image), model_of(ours, written)(image)):
            if not torch.equal(a, b):
                raise ValueError('the converted weights give other outputs')


def same(a: 'Tensor', b: 'Tensor') -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def model_of(ours: dict[str, 'Tensor'], checkpoint: dict[str, 'Tensor']) -> 'nn.Module':
    """The pyramid whose tensors, under our names, are `ours`, with a checkpoint loaded."""
    from cpvt_pyramid import CPVTPyramid
    from cpvt_pyramid.weights import arch_of, shape_of

    arch = arch_of(ours)
    if arch is None:
        raise ValueError(
            f'no pyramid of a known name has these tensors; stages of (dim, depth) {shape_of(ours)}'
        )
    table = ours.get('pos_embeds.0.table')
    peg = any(name.startswith('pos_block.') for name in ours)
    model = CPVTPyramid(
        arch,
        position=f'learned{"+peg" * peg}' if table is not None else 'peg' if peg else 'none',
        pretrain_img_size=224 if table is None else 4 * table.shape[1],
        in_channels=ours['patch_embeds.0.proj.weight'].shape[1],
        out_indices=range(len(shape_of(ours))),
        stage_norm='norm_list.0.weight' in ours,
    )
    model.load_state_dict(checkpoint)
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
        choices=NAMES,
        help="the format; official and timm are the names of Twins' authors, and ours",
    )
    add('--out', metavar='DIR', default='.', help='folder to write to (%(default)s)')
    add('--backbone-only', action='store_true', help="leave a classifier's head out")
    add('--safetensors', action='store_true', help='write a .safetensors file')
    arguments = vars(parser.parse_args(argv))
    try:
        convert(**arguments)
    except (ValueError, OSError) as error:
        print(f'convert_weights: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
