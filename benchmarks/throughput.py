"""Measures images per second of whole commands, from image files to written results.

    python -m benchmarks.throughput configs/retinanet_cpvt_s.py
    python -m benchmarks.throughput configs/semantic_fpn_cpvt_s.py --images ~/photos
    taskset -c 0-7 python -m benchmarks.throughput ...            on some of the cores

The commands take turns, on one core, on two, four and so on, each as a user starts it:

    mm           DetInferencer of mmdetection or MMSegInferencer of mmsegmentation, with
                 mmsegmentation's backbone, batch_size=1, pictures and predictions written
    infer        cpvt infer
    onnxruntime  cpvt run, which needs no torch
    openvino     cpvt run --backend openvino

All have the same random weights. A detector's score threshold is the tenth best score of the first
photograph: as in a trained one, few scores exceed it, and sorting them takes no time. Each command
runs on a small folder, with a photograph per core, and on a large one, which has those and more.
Their difference gives the images per second; what remains is the start.

    start s     imports, the model, and the end; with OpenVINO, compilation
    images/s    median over the rounds
    x mm        ratio to mm on as many cores, median over the rounds
    x one core  ratio to the same command on one core

Models and photographs are kept in a folder and used again. Without --images, the photographs are
those of scikit-image and scikit-learn, every second series turned upright.
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
from typing import Any, Literal

from benchmarks import ROOT
from cpvt_pyramid.tooling.command import UserError, imports_of, run_command
from cpvt_pyramid.tooling.files import make_folder, write_text
from cpvt_pyramid.tooling.report import text_table
from cpvt_pyramid.tooling.threads import usable_cores

COMMANDS = ('mm', 'infer', 'onnxruntime', 'openvino')
CORES = (1, 2, 4, 8, 16)
BOXES = 10  # drawn in the first photograph
PHOTOGRAPHS = ('astronaut', 'chelsea', 'coffee', 'rocket', 'hubble_deep_field', 'retina')
HEAD = ('cores', 'command', 'start s', 'images/s', 'x mm', 'x one core')
# Runs an inferencer of mm, as its documentation does.
INFERENCER = """
import sys
library, config, weights, folder, out, threshold = sys.argv[1:]
if library == 'mmdet':
    from mmdet.apis import DetInferencer
    inferencer = DetInferencer(config, weights, device='cpu')
    inferencer(folder, out_dir=out, no_save_pred=False, pred_score_thr=float(threshold))
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
    per_core: int = 6,
    rounds: int = 3,
    against: str | None = None,
    folder: str = 'work_dirs/throughput',
    json: str | None = None,
) -> None:
    """Measure the commands, printing a table after each round.

    Args:
        config: config file of a detector or a segmentor with a backbone that mmsegmentation has
        commands: what to measure
        cores: numbers of cores; by default 1, 2, 4, 8 and 16, as far as this process has them
        images: photographs; used again if they are too few
        per_core: photographs per core that only the large folder has
        rounds: how often each command runs
        against: measure cpvt infer of this checkout, too, as infer_before
        folder: for models, photographs and results
        json: write the seconds of all runs to this file, after each round
    """
    usable = usable_cores()
    cores = cores or [n for n in CORES if n <= usable]
    if min(per_core, rounds, *cores) < 1 or max(cores) > usable:
        raise UserError(
            '--per-core and --rounds must be at least 1, and --cores at least 1 and at most '
            f'{usable}, the cores of this process'
        )
    work = make_folder(f'{folder}/{Path(config).stem}').resolve()
    photographs = find_photographs(images, make_folder(f'{folder}/photographs'))
    exported = bool({'onnxruntime', 'openvino'} & {*commands})
    threshold = prepare(config, work, photographs[0], exported)
    names = [*commands, *(['infer_before'] if against else [])]
    runs: list[dict[str, Any]] = []
    for _ in range(rounds):
        for count, name in itertools.product(cores, names):
            few, more = (link(photographs, n, work) for n in (count, count * (1 + per_core)))
            seconds = []
            for part in (few, more):
                command = command_line(name, work, part, threshold, against)
                seconds.append(run(command, work, count, len(list(part.iterdir()))))
            each = (seconds[1] - seconds[0]) / (count * per_core)
            start = seconds[0] - count * each
            runs.append({'cores': count, 'command': name, 'each': each, 'start': start})
        print(text_table(HEAD, rows(runs)), flush=True)
        if json:
            write_text(json, dumps(runs) + '\n')


# The models and the photographs


def prepare(config: str, work: Path, photograph: Path, exported: bool) -> str:
    """Write a model with random weights for each command, unless an earlier run has; returns the
    lowest score of a box that is drawn."""
    with imports_of('throughput'):
        import torch

        from benchmarks.contestants import read_config
        from benchmarks.models import ports
        from cpvt_pyramid.checkpoints.formats import to_format
        from cpvt_pyramid.runner.config.load import load_config
        from cpvt_pyramid.runner.config.parts import dataset_meta
        from cpvt_pyramid.runner.inference.batched import ModelPredictor
        from cpvt_pyramid.runner.models import build_model, fetch_checkpoint, load_whole_model

    if not (work / 'threshold').exists():
        cfg = read_config(config)
        model = ports.randomize(build_model(cfg, 'cpu'))
        meta = dataset_meta(cfg, {})
        predictor = ModelPredictor(model, cfg, meta, 1, 0.0)
        prepared = predictor.prepare(photograph, predictor.read(photograph))
        ((_, found),) = predictor.predict([prepared])
        threshold = sorted(getattr(found, 'scores', [0.3]))[-BOXES:][0]
        settings = cfg.model.test_cfg.get('rcnn', cfg.model.test_cfg)
        if 'score_thr' in settings:
            settings.score_thr = float(threshold)
        cfg.dump(work / 'ours.py')
        tensors = model.state_dict()
        backbone = model.backbone.state_dict()
        rest = {k: v for k, v in tensors.items() if not k.startswith('backbone.')}
        theirs = {f'backbone.{k}': v for k, v in to_format(backbone, 'mmseg').items()}
        for name, weights in (('ours', tensors), ('mm', rest | theirs)):
            content = {'state_dict': weights, 'meta': {'dataset_meta': meta}}
            torch.save(content, work / f'{name}.pth')
        backbone = ports.config_of_mmseg(cfg.model.backbone.arch)
        cfg.model.backbone = backbone | {'type': f'mmseg.{backbone["type"]}'}
        preprocessor = cfg.model.data_preprocessor
        preprocessor.type = preprocessor.type.replace('ValidRegion', '')
        cfg.custom_imports = {'imports': ['mmseg.models'], 'allow_failed_imports': False}
        cfg.dump(work / 'mm.py')
        write_text(work / 'threshold', f'{threshold:.4f}')
    if exported and not (work / 'model.onnx').exists():
        print('exporting, without comparisons ...', file=sys.stderr, flush=True)
        cfg = load_config(str(work / 'ours.py'))
        model = build_model(cfg, 'cpu')
        load_whole_model(model, fetch_checkpoint(work / 'ours.pth'), work / 'ours.pth')
        write_onnx(work / 'model.onnx', model, cfg)
    return (work / 'threshold').read_text()


def write_onnx(path: Path, model: Any, cfg: Any) -> None:
    """Export a model as cpvt export does, but without comparisons."""
    import onnx

    from cpvt_pyramid.export import files
    from cpvt_pyramid.export.about import Settings, metadata
    from cpvt_pyramid.export.models import exportable
    from cpvt_pyramid.runner.export import about_config

    graph, settings = exportable(model), Settings()
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
    name: str, work: Path, folder: Path, threshold: str, against: str | None
) -> list[object]:
    """A command of COMMANDS, for a folder of photographs."""
    out, python = work / 'results', sys.executable
    detects = (work / 'mm.py').read_text().find("default_scope = 'mmdet'") >= 0
    if name == 'mm':
        library = 'mmdet' if detects else 'mmseg'
        model = [library, work / 'mm.py', work / 'mm.pth']
        return [python, '-c', INFERENCER, *model, folder, out, threshold]
    options = [folder, '--out-dir', out, *(['--score-thr', threshold] if detects else [])]
    if name.startswith('infer'):
        root = Path(against or '').resolve() if name == 'infer_before' else ROOT
        model = [work / 'ours.py', work / 'ours.pth']
        return [python, root / 'cpvt infer', *model, *options, '--device', 'cpu']
    model = [work / 'model.onnx', *options, '--backend', name]
    return [python, '-m', 'cpvt_pyramid.runtime', *model]


def run(command: Sequence[object], work: Path, cores: int, images: int) -> float:
    """Run a command on some cores: its seconds.

    Raises:
        UserError: it failed, or did not write all results.
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
    files = [path for path in (work / 'results').rglob('*.*') if path.is_file()]
    pictures = [p for p in files if p.parent.name == 'vis' or p.name.endswith('.overlay.jpg')]
    if done.returncode or len(pictures) != images:
        last = (done.stderr.strip().splitlines() or ['no message'])[-1]
        raise UserError(f'{command[1:3]} wrote {len(pictures)} of {images} pictures: {last[:300]}')
    return seconds


# Output


def rows(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """The rows of the table, a line for each command on each number of cores."""
    each, start = defaultdict(list), defaultdict(list)
    for entry in runs:
        key = entry['cores'], entry['command']
        each[key].append(entry['each'])
        start[key].append(entry['start'])

    def faster(key: tuple[int, str], than: tuple[int, str]) -> str:
        if than not in each:
            return ''
        return f'{statistics.median(b / a for a, b in zip(each[key], each[than])):.2f}'

    for cores, name in sorted(each, key=lambda key: key[0]):
        key = cores, name
        yield [
            str(cores),
            name,
            f'{statistics.median(start[key]):.1f}',
            f'{1 / statistics.median(each[key]):.2f}',
            faster(key, (cores, 'mm')),
            faster(key, (1, name)),
        ]


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(throughput, argv)


if __name__ == '__main__':
    sys.exit(main())
