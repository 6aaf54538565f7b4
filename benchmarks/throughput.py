"""Measures images per second of whole commands, from image files to written results.

    python -m benchmarks.throughput configs/demo/pages_retinanet_cpvt_nano.py
    python -m benchmarks.throughput configs/retinanet_cpvt_s.py --count 24 --rounds 3
    python -m benchmarks.throughput configs/semantic_fpn_cpvt_s.py --images ~/photos --cores 2

The commands take turns, on one core, on two, four and so on, each as a user starts it:

    mm           DetInferencer of mmdetection or MMSegInferencer of mmsegmentation, with
                 mmsegmentation's backbone, batch_size=1
    infer        cpvt infer
    onnxruntime  cpvt run, which needs no torch
    openvino     cpvt run --backend openvino

Each runs twice: once with a picture for each image, and once without, as --no-pictures does. mm's
inferencers then write no files at all. All have the same random weights. A detector's score
threshold is the tenth best score of the first photograph: as in a trained one, few scores exceed
it, and sorting them takes no time.

    seconds     of the whole command by the clock, its start included; median over the rounds
    images/s    photographs / seconds
    x mm        ratio to mm on as many cores, median over the rounds; without pictures, to mm that
                writes nothing

Models and photographs are kept in a folder and used again. Without --images, the photographs are
those of scikit-image and scikit-learn, every second series turned upright. With two cores and the
model of the demo, a round takes about three minutes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks import ROOT
from cpvt_pyramid.tooling.command import UserError, imports_of, run_command
from cpvt_pyramid.tooling.files import make_folder, write_text
from cpvt_pyramid.tooling.report import text_table
from cpvt_pyramid.tooling.threads import usable_cores

COMMANDS = ('mm', 'infer', 'onnxruntime', 'openvino')
CORES = (1, 2, 4, 8, 16)
BOXES = 10  # drawn in the first photograph
PHOTOGRAPHS = ('astronaut', 'chelsea', 'coffee', 'rocket', 'hubble_deep_field', 'retina')
HEAD = ('cores', 'command', 'pictures', 'seconds', 'images/s', 'x mm')
# Runs an inferencer of mm, as its documentation does; without a folder for results it writes none.
INFERENCER = """
import sys
library, config, weights, folder, out, threshold = sys.argv[1:]
if library == 'mmdet':
    from mmdet.apis import DetInferencer
    inferencer = DetInferencer(config, weights, device='cpu')
    quiet = {'no_save_pred': not out, 'no_save_vis': not out}
    inferencer(folder, out_dir=out, pred_score_thr=float(threshold), **quiet)
else:
    from mmseg.apis import MMSegInferencer
    MMSegInferencer(config, weights, device='cpu')(folder, out_dir=out)
"""


def throughput(
    config: str,
    *,
    commands: Sequence[Literal[COMMANDS]] = COMMANDS,
    cores: Sequence[int] = (),
    images: str | None = None,
    count: int = 56,
    rounds: int = 1,
    against: str | None = None,
    folder: str = 'work_dirs/throughput',
    json: str | None = None,
) -> None:
    """Measure the commands, printing a table after each round.

    Args:
        config: config file of a detector or a segmentor with a backbone that mmsegmentation has
        commands: what to measure
        cores: numbers of cores; by default 1, 2, 4, 8 and 16, as far as this process has them
        images: folder of photographs
        count: photographs that each command runs on; used again if there are fewer
        rounds: how often each command runs
        against: measure infer of this checkout, too, as infer_before
        folder: for models, photographs and results
        json: write the seconds of all runs to this file, after each round
    """
    usable = usable_cores()
    if not cores:
        cores = [n for n in CORES if n <= usable]
    if min(count, rounds, *cores) < 1 or max(cores) > usable:
        raise UserError(
            '--count and --rounds must be at least 1, and --cores at least 1 and at most '
            f'{usable}, the cores of this process'
        )
    work = make_folder(f'{folder}/{Path(config).stem}').resolve()
    photographs = find_photographs(images, make_folder(f'{folder}/photographs'))
    exported = bool({'onnxruntime', 'openvino'} & {*commands})
    threshold = prepare(config, work, photographs[0], exported)
    names = [*commands]
    if against:
        names.append('infer_before')
    part = link(photographs, count, work)
    runs: list[Run] = []
    for _ in range(rounds):
        for number, pictures, name in itertools.product(cores, (True, False), names):
            command = command_line(name, work, part, threshold, pictures, against)
            images_with_results = 0 if name == 'mm' and not pictures else count
            seconds = run(command, work, number, images_with_results)
            runs.append(Run(number, name, pictures, seconds, count))
        print(text_table(HEAD, rows(runs)), flush=True)
        if json:
            write_text(json, dumps([entry._asdict() for entry in runs]) + '\n')


class Run(NamedTuple):
    """A command that was timed."""

    cores: int
    command: str
    pictures: bool
    seconds: float
    images: int


# The models and the photographs


def prepare(config: str, work: Path, photograph: Path, exported: bool) -> str:
    """Write a model with random weights for each command, unless an earlier run has; returns the
    lowest score of a box that is drawn."""
    if not (work / 'threshold').exists():
        threshold = write_models(config, work, photograph)
        write_text(work / 'threshold', f'{threshold:.4f}')
    if exported and not (work / 'model.onnx').exists():
        print('exporting, without comparisons ...', file=sys.stderr, flush=True)
        export(work)
    return (work / 'threshold').read_text()


def write_models(config: str, work: Path, photograph: Path) -> float:
    """Write our model and mm's, with the same random weights: ours.py, ours.pth, mm.py and mm.pth;
    returns the threshold of their scores."""
    with imports_of('throughput'):
        import torch

        from benchmarks.contestants import read_config
        from benchmarks.models import ports
        from cpvt_pyramid.checkpoints.formats import to_format
        from cpvt_pyramid.config.parts import dataset_meta
        from cpvt_pyramid.predict.openmmlab.models import build_model

    cfg = read_config(config)
    model = ports.randomize(build_model(cfg, 'cpu'))
    meta = dataset_meta(cfg, {})
    threshold = threshold_of(model, cfg, meta, photograph)
    settings = cfg.model.test_cfg.get('rcnn', cfg.model.test_cfg)
    if 'score_thr' in settings:
        settings.score_thr = threshold
    cfg.dump(work / 'ours.py')
    tensors = model.state_dict()
    content = {'state_dict': tensors, 'meta': {'dataset_meta': meta}}
    torch.save(content, work / 'ours.pth')

    backbone = ports.config_of_mmseg(cfg.model.backbone.arch)
    backbone['type'] = f'mmseg.{backbone["type"]}'
    cfg.model.backbone = backbone
    preprocessor = cfg.model.data_preprocessor
    preprocessor.type = preprocessor.type.replace('ValidRegion', '')
    cfg.custom_imports = {'imports': ['mmseg.models'], 'allow_failed_imports': False}
    cfg.dump(work / 'mm.py')
    theirs = {k: v for k, v in tensors.items() if not k.startswith('backbone.')}
    for key, value in to_format(model.backbone.state_dict(), 'mmseg').items():
        theirs[f'backbone.{key}'] = value
    torch.save(content | {'state_dict': theirs}, work / 'mm.pth')
    return threshold


def threshold_of(model: Any, cfg: Any, meta: dict, photograph: Path) -> float:
    """The score of the last of BOXES boxes in a photograph; of a segmentor, a usual threshold."""
    from cpvt_pyramid.predict.openmmlab.trained import ModelPredictor

    predictor = ModelPredictor(model, cfg, meta, 1, 0.0)
    prepared = predictor.prepare(photograph, predictor.read(photograph))
    ((_, found),) = predictor.predict([prepared])
    if not hasattr(found, 'scores'):
        return 0.3
    best = sorted(found.scores, reverse=True)[:BOXES]
    return float(best[-1])


def export(work: Path) -> None:
    """Write model.onnx, the file of ours.py and ours.pth."""
    from cpvt_pyramid.config.load import load_config
    from cpvt_pyramid.predict.openmmlab.models import (
        build_model,
        fetch_checkpoint,
        load_whole_model,
    )

    cfg = load_config(str(work / 'ours.py'))
    model = build_model(cfg, 'cpu')
    weights = work / 'ours.pth'
    load_whole_model(model, fetch_checkpoint(weights), weights)
    write_onnx(work / 'model.onnx', model, cfg)


def write_onnx(path: Path, model: Any, cfg: Any) -> None:
    """Export a model as cpvt export does, but without comparisons."""
    import onnx

    from cpvt_pyramid.export import files
    from cpvt_pyramid.export.about import Settings, metadata
    from cpvt_pyramid.export.models import exportable
    from cpvt_pyramid.runner.export import about_config

    graph = exportable(model)
    settings = Settings()
    about = metadata(graph, model, about_config(cfg, {}), settings)
    file = files.with_all_stages(graph, settings)
    files.finish(file, graph.output_names)
    files.add_metadata(file, about)
    with files.atomic_write(path) as draft:
        onnx.save(file, draft)


def find_photographs(images: str | None, folder: Path) -> list[Path]:
    """The photographs of a user, or those of scikit-image and scikit-learn, written to a folder."""
    if images:
        from cpvt_pyramid.tooling.inputs import find_inputs

        return list(find_inputs([images]))
    if not any(folder.iterdir()):
        with imports_of('throughput'):
            import skimage.data
            from PIL import Image
            from sklearn.datasets import load_sample_images
        arrays = [getattr(skimage.data, name)() for name in PHOTOGRAPHS]
        pictures = [Image.fromarray(x) for x in (*arrays, *load_sample_images().images)]
        upright = [picture.transpose(Image.Transpose.ROTATE_90) for picture in pictures]
        for i, picture in enumerate(pictures + upright):
            picture.save(folder / f'{i:02}.jpg', quality=95)
    return sorted(folder.iterdir())


def link(photographs: Sequence[Path], count: int, work: Path) -> Path:
    """A folder with links to `count` photographs."""
    folder = work / f'{count}-photographs'
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for i, path in zip(range(count), itertools.cycle(photographs)):
        (folder / f'{i:04}{path.suffix}').symlink_to(path.resolve())
    return folder


# The commands


def command_line(
    name: str, work: Path, folder: Path, threshold: str, pictures: bool, against: str | None
) -> list[object]:
    """A command of COMMANDS, for a folder of photographs."""
    out = work / 'results'
    detects = "default_scope = 'mmdet'" in (work / 'mm.py').read_text()
    if name == 'mm':
        library = 'mmdet' if detects else 'mmseg'
        model = [library, work / 'mm.py', work / 'mm.pth']
        return [
            sys.executable,
            '-c',
            INFERENCER,
            *model,
            folder,
            out if pictures else '',
            threshold,
        ]
    options: list[object] = [folder, '--out-dir', out]
    if detects:
        options += ['--score-thr', threshold]
    if not pictures:
        options.append('--no-pictures')
    if name in ('infer', 'infer_before'):
        root = Path(against).resolve() if against and name == 'infer_before' else ROOT
        model = [work / 'ours.py', work / 'ours.pth']
        return [sys.executable, root / 'tools/infer.py', *model, *options, '--device', 'cpu']
    model = [work / 'model.onnx']
    return [sys.executable, '-m', 'cpvt_pyramid', 'run', *model, *options, '--backend', name]


def run(command: Sequence[object], work: Path, cores: int, images: int) -> float:
    """Run a command on some cores: its seconds.

    Raises:
        UserError: it failed, or did not write the results of all images.
    """
    shutil.rmtree(work / 'results', ignore_errors=True)
    own = sorted(os.sched_getaffinity(0))[:cores]
    environment = {k: v for k, v in os.environ.items() if not k.endswith('_NUM_THREADS')}
    start = time.perf_counter()
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=partial(os.sched_setaffinity, 0, own),
    )
    seconds = time.perf_counter() - start
    written = count_results(work / 'results')
    if done.returncode or written != images:
        last = (done.stderr.strip().splitlines() or ['no message'])[-1]
        raise UserError(f'{command[1:4]} wrote results of {written} of {images}: {last[:300]}')
    return seconds


def count_results(folder: Path) -> int:
    """The images with results in a folder of mm's inferencers or of ours."""
    names = [path.name for path in folder.rglob('*.*')]
    ours = [name for name in names if name.endswith(('.detections.json', '.labels.png'))]
    return len(ours) or len(list(folder.glob('vis/*')))


# Output


def rows(runs: Sequence[Run]) -> Iterator[list[str]]:
    """The rows of the table, a line for each command on each number of cores."""
    seconds: dict[tuple[int, bool, str], list[float]] = defaultdict(list)
    for entry in runs:
        seconds[entry.cores, entry.pictures, entry.command].append(entry.seconds)
    for (cores, pictures, name), each in seconds.items():
        of_mm = seconds.get((cores, pictures, 'mm'), [])
        ratios = [theirs / own for theirs, own in zip(of_mm, each)]
        yield [
            str(cores),
            name,
            'yes' if pictures else 'no',
            f'{statistics.median(each):.1f}',
            f'{runs[0].images / statistics.median(each):.2f}',
            f'{statistics.median(ratios):.2f}' if ratios else '',
        ]


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(throughput, argv)


if __name__ == '__main__':
    sys.exit(main())
