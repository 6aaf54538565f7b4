"""Loading of published checkpoints.

`prepare_state_dict` runs as a pre-hook of every `load_state_dict`, so that torch, mmengine's
`Pretrained`, `load_from` and `resume` all read the same files:
  - wrappers (`state_dict`, `model`, ...) and prefixes (`module.`, `backbone.`) are taken off;
  - names of mmsegmentation's and mmpretrain's converted files become the official ones;
  - what a backbone has no use for is left out: the classifier, its norm, and stages that were
    not built;
  - the stage norms of SVT, which classification checkpoints do not hold, keep their values.
"""

import re
from pathlib import Path
from typing import NamedTuple, Union

import torch
from torch import Tensor, nn

WRAPPERS = ('state_dict_ema', 'model_ema', 'state_dict', 'model')
PREFIXES = ('module.', 'backbone.')
# mmsegmentation's and mmpretrain's names, and the official ones, which are ours.
RENAMES = [
    (re.compile(pattern), official)
    for pattern, official in (
        (r'^patch_embeds\.(\d+)\.projection\.', r'patch_embeds.\1.proj.'),
        (r'^position_encodings\.(\d+)\.proj\.', r'pos_block.\1.proj.0.'),
        (r'^(?:layers|stages)\.(\d+)\.(\d+)\.', r'blocks.\1.\2.'),
        (r'^norm_after_stage(\d+)\.', r'norm_list.\1.'),
        (r'\.ffn\.layers\.0\.0\.', '.mlp.fc1.'),
        (r'\.ffn\.layers\.1\.', '.mlp.fc2.'),
        (r'\.attn\.attn\.out_proj\.', '.attn.proj.'),
    )
]
IN_PROJ = re.compile(r'\.attn\.attn\.in_proj_(weight|bias)$')  # rows [q; kv]
CLASSIFIER = re.compile(r'(norm|head)\.(weight|bias)$')
STAGE = re.compile(r'(patch_embeds|blocks|pos_block|norm_list)\.(\d+)\.')

# A checkpoint of which less than this matches is a mistake and not a partial checkpoint.
LEAST_MATCH = 0.1


class LoadReport(NamedTuple):
    """What became of the tensors of a checkpoint; names are those of the model."""

    loaded: list[str]  # in both, with one shape
    kept: list[str]  # in the model alone: these keep their values
    unused: list[str]  # in the checkpoint alone
    mismatched: list[str]  # in both, with two shapes

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.kept) + len(self.mismatched)
        lines = [f'loaded {len(self.loaded)} of {total} tensors of the backbone']
        for what, names in (
            ('not in the checkpoint', self.kept),
            ('not in the model', self.unused),
            ('of another shape', self.mismatched),
        ):
            if names:
                more = f' and {len(names) - 6} more' if len(names) > 6 else ''
                lines.append(f'{what}: {", ".join(names[:6])}{more}')
        return '; '.join(lines)


def load_weights(model: nn.Module, path: Union[str, Path]) -> LoadReport:
    """Load a checkpoint file into a model of this package.

    Args:
        model: a `CPVTPyramid`.
        path: a `.pth` or `.safetensors` file in any format that this module reads.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: hardly anything in the checkpoint matches the model, or shapes differ.
    """
    model.load_state_dict(read_checkpoint(path), strict=False)
    if model.load_report.mismatched:
        raise ValueError(f'{path} is of another architecture: {model.load_report}')
    return model.load_report


def read_checkpoint(path: Union[str, Path], map_location: str = 'cpu') -> dict:
    """The content of a `.pth` or `.safetensors` file, of tensors and plain values alone."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f'no checkpoint at {path}')
    if path.suffix == '.safetensors':
        from safetensors.torch import load_file

        return load_file(path, device=map_location)
    return torch.load(path, map_location=map_location, weights_only=True)


def prepare_state_dict(module: nn.Module, state_dict: dict, prefix: str, *_unused: object) -> None:
    """Turn a published checkpoint into the model's own keys, in place; a load-state-dict pre-hook.

    Leaves `module.load_report` behind.

    Args:
        module: the model that loads.
        state_dict: the checkpoint, or the part of it under `prefix`.
        prefix: the module's name in the model that loads, with a dot behind it, or ''.

    Raises:
        ValueError: less than a tenth of the model's tensors are in the checkpoint.
    """
    theirs = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
    if not theirs:  # a checkpoint of something else: a neck, a head
        return
    theirs = {name: value for name, value in unwrap(theirs).items() if isinstance(value, Tensor)}
    theirs = official_names(theirs)
    stages = len(module.blocks)
    for name in list(theirs):
        stage = STAGE.match(name)
        if CLASSIFIER.match(name) or (stage and int(stage[2]) >= stages):
            del theirs[name]

    ours = nn.Module.state_dict(module)
    shared = [name for name in ours if name in theirs]
    loaded = [name for name in shared if theirs[name].shape == ours[name].shape]
    mismatched = [name for name in shared if theirs[name].shape != ours[name].shape]
    kept = [name for name in ours if name not in theirs]
    unused = [name for name in theirs if name not in ours]
    module.load_report = LoadReport(loaded, kept, unused, mismatched)
    if len(loaded) < LEAST_MATCH * len(ours):
        raise ValueError(
            f'the checkpoint is not one of this backbone: {module.load_report}. '
            f'Check the arch, the file and, in an init_cfg, the prefix'
        )

    if not any(name.startswith('norm_list.') for name in theirs):
        theirs |= {name: ours[name] for name in kept if name.startswith('norm_list.')}
    for name in [name for name in state_dict if name.startswith(prefix)]:
        del state_dict[name]
    state_dict.update({prefix + name: value for name, value in theirs.items()})


def unwrap(checkpoint: dict) -> dict:
    """The state dict inside a checkpoint, without the prefix that all or some of its keys have."""
    for wrapper in WRAPPERS:
        if isinstance(checkpoint.get(wrapper), dict):
            checkpoint = checkpoint[wrapper]
    for prefix in PREFIXES:
        inner = {k[len(prefix) :]: v for k, v in checkpoint.items() if k.startswith(prefix)}
        checkpoint = inner or checkpoint
    return checkpoint


def official_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of the official checkpoints, whatever names they had."""
    official = {}
    for name, value in tensors.items():
        for pattern, replacement in RENAMES:
            name = pattern.sub(replacement, name)
        in_proj = IN_PROJ.search(name)
        if in_proj:
            stem, kind = name[: in_proj.start()], in_proj[1]
            q, k, v = value.chunk(3)
            official[f'{stem}.attn.q.{kind}'] = q
            official[f'{stem}.attn.kv.{kind}'] = torch.cat([k, v])
        else:
            official[name] = value
    return official
