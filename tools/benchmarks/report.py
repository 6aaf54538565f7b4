#!/usr/bin/env python
"""Measures the package on this machine, and writes one Markdown page.

    make gpu-report                                               # tests/cuda, too
    make cpu-report
    python tools/benchmarks/report.py --device cuda --parts inference whole-models
    python tools/benchmarks/report.py --device cpu --small        # to see the page's form

Each part has a time limit; all together have 38 minutes on a GPU and 115 on a CPU. The result of a
part is a file in the folder of the report, and a part whose file is there does not run again: an
interrupted report continues, and deleting a file repeats its part. The page is written after each
part.
"""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from cpvt_pyramid.tooling.command import UserError, run_command  # noqa: E402
from cpvt_pyramid.tooling.files import atomic_write, make_folder  # noqa: E402

FOLDER = 'tools/benchmarks'
PACKAGES = (
    'torch', 'timm', 'onedl-mmcv', 'mmcv', 'onedl-mmdetection', 'onedl-mmsegmentation',
    'onnxruntime', 'openvino',
)  # fmt: skip
GRACE = 30  # seconds for a process that is interrupted
OPTIONS_WHEN_SMALL = '--arch pcpvt_nano --models ours --sizes 64 --rounds 1 --no-memory'


class Part(NamedTuple):
    """A part of the report."""

    title: str
    minutes: float  # time limit
    runs: tuple[str, ...] = ()  # options of the tool; none: the GPU suite
    tool: str = 'speed.py'
    plot: bool = False  # draw time and memory of the first run over image size


BOTH, DTYPES = '--steps forward train', '--dtypes float32 tf32 bfloat16 float16'
GPU = {
    'tests': Part('GPU suite', 12),
    'inference': Part(
        'Inference and training, PCPVT-S',
        7,
        (
            f'--arch pcpvt_small --sizes 224 --batch 128 {BOTH} --dtypes bfloat16 --with-cp',
            f'--arch pcpvt_small --sizes 512 --batch 8 {BOTH} {DTYPES} --with-cp',
            f'--arch pcpvt_small --sizes 800x1344 --batch 2 {BOTH} {DTYPES} --with-cp --profile',
        ),
    ),
    'windows': Part(
        'Inference and training, SVT-S',
        5,
        (
            f'--arch svt_small --sizes 224 --batch 128 {BOTH} --dtypes bfloat16 --with-cp',
            f'--arch svt_small --sizes 448 --batch 8 {BOTH} --dtypes float32 bfloat16 --with-cp',
            f'--arch svt_small --sizes 896x1344 --batch 2 {BOTH} --dtypes bfloat16 --with-cp',
        ),
    ),
    'compiled': Part(
        'Compiled',
        5,
        (
            '--arch pcpvt_small --sizes 512 800x1344 --batch 2 --dtypes bfloat16 --compile '
            '--models ours timm',
            '--arch svt_small --sizes 448 --batch 8 --dtypes bfloat16 --compile --models ours timm',
        ),
    ),
    'peers': Part(
        'Other backbones',
        4,
        (
            f'--arch pcpvt_small --sizes 224 448 896 1344 --batch 4 {BOTH} --dtypes bfloat16 '
            '--models ours timm mmseg mmdet pvt_v2_b2 swin_tiny convnext_tiny resnet50',
        ),
        plot=True,
    ),
    'whole-models': Part(
        'RetinaNet-S and Semantic FPN-S as a whole',
        5,
        (
            f'--config configs/retinanet_cpvt_s.py --sizes 800x1344 --batch 2 {BOTH}',
            f'--config configs/semantic_fpn_cpvt_s.py --sizes 512 --batch 8 {BOTH}',
        ),
    ),
}

CPU = {
    'runtimes': Part(
        'Inference, and the runtimes',
        15,
        tuple(
            f'--arch {arch} --models ours timm --runtimes --no-memory {options}'
            for options in (
                '--sizes 512 --dtypes float32 bfloat16',
                '--sizes 800x1344 --rounds 3',
            )
            for arch in ('pcpvt_small', 'svt_small')
        ),
    ),
    'training': Part(
        'Inference, training and memory',
        30,
        (
            f'--arch pcpvt_small --sizes 512 {BOTH} --with-cp --rounds 5',
            f'--arch svt_small --sizes 448 {BOTH} --with-cp --rounds 5',
            f'--arch pcpvt_small --sizes 800x1344 {BOTH} --with-cp --rounds 3',
            f'--arch svt_small --sizes 896x1344 {BOTH} --with-cp --rounds 3',
            '--arch svt_small --models ours timm --sizes 800x1344 --steps train --with-cp '
            '--rounds 1',
        ),
    ),
    'busy': Part(
        'A busy machine',
        4,
        ('--arch svt_small --sizes 512 --busy --rounds 3 --no-memory',),
    ),
    'whole-models': Part(
        'RetinaNet-S and Semantic FPN-S, part by part',
        6,
        (
            'configs/semantic_fpn_cpvt_s.py --size 512',
            'configs/retinanet_cpvt_s.py --size 800x1344 --rounds 1',
        ),
        tool='parts.py',
    ),
    'detector': Part(
        'Training RetinaNet-S',
        10,
        (
            '--config configs/retinanet_cpvt_s.py --models ours mmseg --sizes 800x1344 '
            '--steps train --rounds 1',
        ),
    ),
    'compiled': Part(
        'Compiled',
        20,
        tuple(
            f'--models ours timm --no-memory --compile --rounds 5 {options}'
            for options in ('--sizes 512 800x1344', '--sizes 512 --steps train')
        ),
    ),
    'peers': Part(
        'Other backbones',
        30,
        (
            '--models ours timm swin_tiny convnext_tiny resnet50 '
            '--sizes 224 448 896 1344 2048 --rounds 2',
            '--models ours mmseg mmdet pvt_v2_b2 --sizes 224 448 896 1344 --rounds 2',
        ),
        plot=True,
    ),
}
REPORTS = {'cuda': GPU, 'cpu': CPU}


def report(
    *,
    device: Literal[tuple(REPORTS)],
    parts: Sequence[str] = (),
    out: str | None = None,
    small: bool = False,
) -> int:
    """Run the parts that have no result yet, and write report.md.

    Args:
        device: what to measure
        parts: which to run; all by default
        out (FOLDER): folder of the results and of the page; by default work_dirs/gpu-report or
            work_dirs/cpu-report
        small: a tiny model at one size in each part, to try the report itself
    """
    import torch

    known = REPORTS[device]
    if unknown := set(parts) - set(known):
        raise UserError(f'no part {min(unknown)}; one of {", ".join(known)}')
    if device == 'cuda' and not torch.cuda.is_available():
        raise UserError('this torch finds no GPU; python -m cpvt_pyramid.doctor tells you why')
    start, parts = time.monotonic(), parts or list(known)
    folder = make_folder(out or f'work_dirs/{"gpu" if device == "cuda" else "cpu"}-report')
    for name in parts:
        if (folder / f'{name}.json').exists():
            print(f'{name}: done before')
            continue
        print(f'{name}: {known[name].title} ...', flush=True)
        result = run_part(name, folder, device, small)
        with atomic_write(folder / f'{name}.json') as file:
            file.write_text(json.dumps(result, indent=1) + '\n')
        write_page(folder, device)
    write_page(folder, device)
    print(f'{folder / "report.md"}: {(time.monotonic() - start) / 60:.0f} minutes')
    results = [json.loads((folder / f'{name}.json').read_text()) for name in parts]
    return int(any(run['failed'] for result in results for run in result['runs']))


def run_part(name: str, folder: Path, device: str, small: bool) -> dict:
    """The result of a part: for each of its runs the command, its output, and why it failed."""
    part, runs = REPORTS[device][name], []
    deadline = time.monotonic() + 60 * part.minutes
    if not part.runs:
        return {'runs': [run_suite(folder, deadline)]}
    tool = f'{FOLDER}/{"speed.py" if small else part.tool}'
    for i, options in enumerate((OPTIONS_WHEN_SMALL,) if small else part.runs):
        shown = f'python {tool} {options}' + ' --device cuda' * (device == 'cuda')
        picture, plot = folder / f'{name}.png', part.plot and i == 0
        if plot:
            picture.unlink(missing_ok=True)  # of a run that was interrupted
        run = run_process([*shown.split()[1:], *['--plot', str(picture)] * plot], deadline)
        drawn = plot and picture.exists()
        runs.append(run | {'command': shown, 'picture': picture.name if drawn else None})
    return {'runs': runs}


def run_suite(folder: Path, deadline: float) -> dict:
    """Run tests/cuda; counts of its outcomes, and the first line of each failure."""
    xml = folder / '.tests.xml'
    run = run_process(['-m', 'pytest', 'tests/cuda', f'--junitxml={xml}'], deadline)
    if xml.exists():
        run['output'] = outcomes(list(ElementTree.parse(xml).iter('testcase')))
        xml.unlink()
    return run | {'command': 'python -m pytest tests/cuda', 'picture': None}


def outcomes(cases: Sequence[ElementTree.Element]) -> str:
    """Counts of the outcomes of tests, and the first line of each failure."""
    counts = {'passed': 0, 'failure': 0, 'error': 0, 'skipped': 0}
    failures = []
    for case in cases:
        outcome = next((x for x in case if x.tag in counts), None)
        counts['passed' if outcome is None else outcome.tag] += 1
        if outcome is not None and outcome.tag != 'skipped':
            first = (outcome.get('message', '').splitlines() or [''])[0]
            failures.append(f'{case.get("classname")}.{case.get("name")}: {first[:200]}')
    seconds = sum(float(case.get('time')) for case in cases)
    shown = ', '.join(f'{count} {outcome}' for outcome, count in counts.items() if count)
    return '\n'.join([f'{shown} in {seconds:.0f} s', *failures])


def run_process(options: Sequence[str], deadline: float) -> dict:
    """Run Python with these options in the checkout. `output`: what it printed; `failed`: why it
    did, or None."""
    with tempfile.TemporaryFile('w+') as output, tempfile.TemporaryFile('w+') as errors:
        process = subprocess.Popen(
            [sys.executable, *options], cwd=ROOT, stdout=output, stderr=errors
        )
        try:
            status = process.wait(max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(process)
        for file in (output, errors):
            file.seek(0)
        failed = None
        if status is None:
            failed = 'the time limit of its part'
        elif status:
            last = (errors.read().strip().splitlines() or ['no message'])[-1]
            failed = f'exit status {status}: {last[:300]}'
        return {'output': output.read().strip(), 'failed': failed}


def stop(process: subprocess.Popen) -> None:
    """Interrupt a process that still runs, as Ctrl-C does: it draws what it has measured, and stops
    its own processes."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# The page


def write_page(folder: Path, device: str) -> None:
    """Write report.md from the results in the folder."""
    lines = [f'# Report: {"GPU" if device == "cuda" else "CPU"}', '', *machine_lines(device)]
    for name, part in REPORTS[device].items():
        if not (folder / f'{name}.json').exists():
            continue
        lines += ['', f'## {part.title}']
        for run in json.loads((folder / f'{name}.json').read_text())['runs']:
            lines += ['', '```', f'$ {run["command"]}', *run['output'].splitlines(), '```']
            if run['failed']:
                lines += ['', f'**Failed:** {run["failed"]}']
            if run['picture']:
                lines += ['', f'![time and memory over image size]({run["picture"]})']
    with atomic_write(folder / 'report.md') as file:
        file.write_text('\n'.join(lines) + '\n')


def machine_lines(device: str) -> list[str]:
    """The processor or the GPU, and versions, as a table."""
    import torch

    facts = {'system': platform.platform(), 'Python': platform.python_version()}
    if device == 'cuda':
        properties = torch.cuda.get_device_properties(device)
        facts['GPU'] = f'{properties.name}, {properties.total_memory / 2**30:.0f} GiB'
        facts['driver'] = driver()
        facts['CUDA of torch, cuDNN'] = f'{torch.version.cuda}, {torch.backends.cudnn.version()}'
    else:
        facts['processor'] = processor()
        facts['threads'] = str(torch.get_num_threads())
        facts['instructions used by torch'] = torch.backends.cpu.get_cpu_capability()
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    rows = [f'| {name} | {value} |' for name, value in facts.items()]
    return ['| | |', '|---|---|', *rows]


def processor() -> str:
    """The processor's name; many virtual machines hide the model, but not its numbers."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    found = dict(
        reversed([[x.strip() for x in line.split(':', 1)] for line in lines if ':' in line])
    )
    numbers = [f'{key} {found[key]}' for key in ('cpu family', 'model') if key in found]
    return ', '.join([found.get('model name', platform.machine()), *numbers])


def driver() -> str:
    try:
        query = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return 'unknown'


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(report, argv, 'finished parts are kept; the same command continues')


if __name__ == '__main__':
    sys.exit(main())
