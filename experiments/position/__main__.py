"""Ask the position laboratory: experiments on where a model's sense of position comes from.

    python -m experiments.position encodings placement resolution     # what `make lab` asks
    python -m experiments.position encodings --preset full --seeds 5
    python -m experiments.position probe padding shift attention --model timm:convnext_tiny

Each question prints its tables and writes WORK_DIR/QUESTION.json and figures. All answers in
WORK_DIR together are report.html. Trainings are kept in WORK_DIR/runs: what is there
is not computed twice, and an interrupted command continues where it was, with the same results.
docs/position.md has our findings, experiments/position/findings/protocol.md explains the questions.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

if TYPE_CHECKING:
    from torch import nn

    from cpvt_pyramid.lab.probes import Subject

TRAINED = ('encodings', 'placement', 'resolution', 'canvas')
MEASURED = ('probe', 'padding', 'shift', 'attention', 'registers')


def position_lab(
    questions: Sequence[
        Literal[
            'encodings', 'placement', 'resolution', 'canvas',
            'probe', 'padding', 'shift', 'attention', 'registers',
        ]
    ],
    *,
    preset: Literal['smoke', 'default', 'full', 'pyramid'] = 'default',
    work_dir: str = 'work_dirs/position_lab',
    seed: int = 0,
    seeds: Optional[int] = None,
    model: Sequence[str] = (),
    checkpoint: Optional[str] = None,
    size: int = 224,
    workers: Optional[int] = None,
    device: Literal['cpu', 'cuda'] = 'cpu',
    page: Optional[str] = None,
) -> None:  # fmt: skip
    """Answer the questions and write the report.

    Args:
        questions: what to ask
        preset: amount of work: default takes half an hour on two cores for encodings, placement
            and resolution; full, hours; pyramid is default with pyramids instead of columnar
            models; smoke takes seconds, and shows nothing
        work_dir: folder of all results
        seed: first seed of the tables
        seeds: number of seeds (default: the preset's)
        model: models to measure instead of the lab's own: timm:NAME, torchvision:NAME, a name of
            ours such as pcpvt_small, or an mm config; for probe, padding, shift, attention and
            registers
        checkpoint: weights of the model, a path or an address (timm://, hf://, https://); random if
            not given
        size: side of the images for --model, in pixels
        workers: processes that train (default: the number of cores)
        device: of the training
        page: Markdown page that takes the tables and figures of these questions between
            <!-- findings --> and <!-- /findings -->, as experiments/position/findings/tables.md
    """
    from cpvt_pyramid.tooling.command import UserError, one_line
    from cpvt_pyramid.tooling.threads import usable_cores

    for name, value, least in (('seed', seed, 0), ('seeds', seeds, 1), ('workers', workers, 1),
                               ('size', size, 64)):  # fmt: skip
        if value is not None and value < least:
            raise UserError(f'--{name} must be at least {least}, got {value}')
    if size % 32:
        raise UserError(f'--size must be a multiple of 32, got {size}')
    trained = [question for question in questions if question in TRAINED]
    if model and trained:
        raise UserError(
            f'{", ".join(trained)} trains models of its own; --model is for {", ".join(MEASURED)}'
        )
    if checkpoint and len(model) != 1:
        raise UserError(f'--checkpoint needs one --model, got {len(model)}')
    if page and not Path(page).is_file():
        raise UserError(f'there is no page {page}')
    folder = Path(work_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f'--work-dir must be a folder, but {folder} is a file')

    import torch

    from experiments.position import measures
    from experiments.position import questions as trainings
    from experiments.position.laboratory import PRESETS, Lab
    from experiments.position.tasks import TASKS, ceilings
    from experiments.report import save, write_findings, write_lab_report

    if device == 'cuda' and not torch.cuda.is_available():
        raise UserError('--device cuda needs a GPU that torch can use; there is none')
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot create {folder}: {error.strerror}') from None
    chosen = PRESETS[preset]
    cores = usable_cores() if device == 'cpu' else 1
    lab = Lab(chosen, folder, seed, seeds or chosen.seeds, workers or cores, device)
    subjects = [load_subject(name, checkpoint, size) for name in model]
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise UserError(f'models must have different names, got {", ".join(names)}')
    ceiling = ', '.join(f'{TASKS[name].question} {100 * value:.1f}'
                        for name, value in ceilings().items())  # fmt: skip
    if not model:
        print(f'What a bag of patches can reach, in %: {ceiling}', flush=True)
    for question in questions:
        if question in TRAINED:
            finding = trainings.TRAINED[question](lab)
        else:
            try:
                finding = measures.MEASURED[question](lab, subjects, size)
            except (ValueError, RuntimeError, AssertionError) as error:
                if not subjects:
                    raise
                problem = f'{", ".join(names)}: {one_line(error)}'
                raise UserError(f'cannot measure {problem}') from error
        save(finding, {**chosen._asdict(), 'seeds': list(range(seed, seed + lab.seeds))}, folder)
        print(f'\n{finding.title}')
        for table in finding.tables:
            print(f'\n{table.text()}')
        print(f'\n{folder / question}.json; figures: {", ".join(finding.figures)}', flush=True)
        report = write_lab_report(folder, (*TRAINED, *MEASURED))
    if page:
        try:
            write_findings(folder, questions, Path(page))
        except ValueError as error:
            raise UserError(str(error)) from None
    print(f'\nReport: {report}')


def load_subject(name: str, checkpoint: Optional[str], size: int) -> Subject:
    """A model to be measured, by its name on the command line."""
    from cpvt_pyramid.lab.probes import Subject
    from cpvt_pyramid.tooling.command import UserError, one_line

    try:
        model = load_model(name, checkpoint, size)
    except UserError:
        raise
    except (ConnectionError, FileNotFoundError) as error:  # of the checkpoint
        raise UserError(str(error)) from error
    except Exception as error:  # builders of other packages fail in many ways
        weights = f' with {checkpoint}' if checkpoint else ''
        what = f'{type(error).__name__}: {one_line(error)}'
        raise UserError(f'cannot build --model {name}{weights}: {what}') from error
    label = Path(name).stem if name.endswith('.py') else name
    return Subject(label if checkpoint else f'{label}, random weights', model)


def load_model(name: str, checkpoint: Optional[str], size: int) -> nn.Module:
    """The backbone that a name stands for."""
    import torch

    from cpvt_pyramid import ARCHS, COLUMNAR_ARCHS, CPVTPyramid, load_weights
    from cpvt_pyramid.checkpoints.reading import listed, read_checkpoint, tensors_of
    from cpvt_pyramid.columnar import Column
    from cpvt_pyramid.tooling.command import UserError

    torch.manual_seed(0)
    family, _, rest = name.partition(':')
    if family == 'timm':
        import timm

        if not timm.is_model(rest):
            close = difflib.get_close_matches(rest, timm.list_models(), 3)
            raise UserError(f'timm has no model {rest!r}; close: {", ".join(close) or "none"}')
        if not checkpoint:
            return build_timm(rest, size)
        weights = tensors_of(read_checkpoint(checkpoint)) or {'': torch.zeros(0)}
        source = {'state_dict': weights, 'custom_load': False}
        seed = 987_654_321  # no checkpoint should have been made with it
        model = build_timm(rest, size, seed, pretrained=True, pretrained_cfg_overlay=source)
        # timm loads what it finds. Random weights that stay as they were are not in the file.
        untrained = build_timm(rest, size, seed).state_dict()
        kept = [
            name
            for name, value in model.state_dict().items()
            if value.dim() > 1 and value.std() > 0 and torch.equal(value, untrained[name])
        ]
        if kept:
            raise UserError(f'{checkpoint} lacks weights of {rest}: {listed(kept)}')
        return model
    if family == 'torchvision':
        return torchvision_backbone(rest, checkpoint, size)
    if name in ARCHS or name in COLUMNAR_ARCHS:
        model = (CPVTPyramid if name in ARCHS else Column)(name)
        if checkpoint:
            load_weights(model, checkpoint)
        return model
    if name.endswith('.py'):
        from cpvt_pyramid.runner.config.load import load_config
        from cpvt_pyramid.runner.models import build_model, fetch_checkpoint, load_whole_model

        model = build_model(load_config(name), 'cpu')
        if checkpoint:
            load_whole_model(model, fetch_checkpoint(checkpoint), checkpoint)
        return model.backbone
    names = ', '.join((*ARCHS, *COLUMNAR_ARCHS))
    raise UserError(
        f'unknown --model {name!r}; timm:NAME, torchvision:NAME, an mm config (.py) or one of '
        f'{names}'
    )


def build_timm(name: str, size: int, seed: int = 0, **options: Any) -> nn.Module:
    """The maps of a timm model; `seed` is that of its random weights."""
    import timm
    import torch

    # Models of a fixed size are built for this one and must take others: padded images are larger.
    # Their options differ, and other models have none of them.
    for any_size in ({'strict_img_size': False}, {'dynamic_img_size': True}):
        torch.manual_seed(seed)
        try:
            return timm.create_model(name, features_only=True, img_size=size, **any_size, **options)
        except TypeError:
            continue
    torch.manual_seed(seed)
    return timm.create_model(name, features_only=True, **options)


def torchvision_backbone(name: str, checkpoint: Optional[str], size: int) -> nn.Module:
    """The maps of a torchvision classifier, the last of each resolution, by tracing."""
    import torch
    import torchvision
    from torchvision.models.feature_extraction import create_feature_extractor

    from cpvt_pyramid.checkpoints.reading import read_checkpoint, tensors_of
    from cpvt_pyramid.lab.probes import Subject
    from cpvt_pyramid.tooling.command import UserError

    if name not in torchvision.models.list_models(torchvision.models):
        raise UserError(f'torchvision has no classifier {name!r}')
    model = torchvision.models.get_model(name, weights=None)
    if checkpoint:
        model.load_state_dict(tensors_of(read_checkpoint(checkpoint)))
    names = [f'layer{i}' for i in range(1, 5)]
    if not hasattr(model, 'layer4'):
        if not hasattr(model, 'features'):
            raise UserError(f'torchvision:{name} has neither layer1 to layer4 nor features')
        names = [f'features.{child}' for child, _ in model.features.named_children()]
    extractor = create_feature_extractor(model.eval(), names)
    maps = Subject(name, extractor).maps(torch.zeros(1, 3, size, size))
    last = {map_.shape[2:]: node for node, map_ in zip(names, maps)}
    return create_feature_extractor(model, list(last.values()))


def main(argv: Optional[Sequence[str]] = None) -> int:
    from cpvt_pyramid.tooling.command import run_command

    return run_command(position_lab, argv, interrupted='run the same command to continue')


if __name__ == '__main__':
    sys.exit(main())
