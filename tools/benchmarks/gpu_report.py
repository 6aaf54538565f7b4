#!/usr/bin/env python
"""Tests and measures the package on a GPU, and writes one Markdown page.

    make gpu-report
    python tools/benchmarks/gpu_report.py --parts inference whole-models
    python tools/benchmarks/gpu_report.py --device cpu --small    # to see the page's form

Each part is a process of its own with a time limit. Its result is a file in the folder of the
report, and a part whose file is there does not run again: an interrupted report continues, and
deleting a file repeats its part. The page is written after each part.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from cpvt_pyramid.tooling.command import UserError, run_command  # noqa: E402
from cpvt_pyramid.tooling.files import atomic_write, make_folder  # noqa: E402

SPEED = 'tools/benchmarks/speed.py'
TABLE = ('model', 'ms', 'images/s', 'ratio', 'MiB', 'GFLOPs', 'x floor', 'differs', 'graphs')
PACKAGES = ('torch', 'timm', 'onedl-mmcv', 'mmcv', 'onedl-mmdetection', 'onedl-mmsegmentation')
OPTIONS_WHEN_SMALL = '--arch pcpvt_nano --models ours --sizes 64 --rounds 1 --no-memory'


class Part(NamedTuple):
    """A part of the report."""

    title: str
    minutes: float  # time limit
    runs: tuple[str, ...] = ()  # options of speed.py; none: the GPU suite
    plot: bool = False  # draw time and memory over image size


BOTH, DTYPES = '--steps forward train', '--dtypes float32 tf32 bfloat16 float16'
PARTS = {
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


def gpu_report(
    *,
    parts: Sequence[Literal[tuple(PARTS)]] = tuple(PARTS),
    out: str = 'work_dirs/gpu-report',
    device: str = 'cuda',
    small: bool = False,
) -> int:
    """Run the parts that have no result yet, and write report.md.

    Args:
        parts: which to run
        out (FOLDER): folder of the results and of the page
        device: torch device
        small: a tiny model at one size in each part, to try the report itself
    """
    import torch

    if device.startswith('cuda') and not torch.cuda.is_available():
        raise UserError('this torch finds no GPU; python -m cpvt_pyramid.doctor tells you why')
    folder, start = make_folder(out), time.monotonic()
    for name in parts:
        if (folder / f'{name}.json').exists():
            print(f'{name}: done before')
            continue
        print(f'{name}: {PARTS[name].title} ...', flush=True)
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
    part, runs = PARTS[name], []
    deadline = time.monotonic() + 60 * part.minutes
    if not part.runs:
        return {'runs': [run_suite(folder, deadline)]}
    for i, options in enumerate(part.runs[: 1 if small else None]):
        figures, picture = folder / f'.{name}-{i}.json', folder / f'{name}-{i}.png'
        for file in (figures, picture):
            file.unlink(missing_ok=True)  # of a run that was interrupted
        options = OPTIONS_WHEN_SMALL if small else options
        shown = f'python {SPEED} --device {device} {options}'
        files = ['--json', str(figures)] + ['--plot', str(picture)] * part.plot
        run = run_process([*shown.split()[1:], *files], deadline)
        if figures.exists():  # also if later tables failed
            run |= json.loads(figures.read_text())
            figures.unlink()
        runs.append(run | {'command': shown, 'picture': picture.name if picture.exists() else None})
    return {'runs': runs}


def run_suite(folder: Path, deadline: float) -> dict:
    """Run tests/cuda; counts of its outcomes, and the first line of each failure."""
    xml = folder / '.tests.xml'
    run = run_process(['-m', 'pytest', 'tests/cuda', f'--junitxml={xml}'], deadline)
    if xml.exists():
        cases = list(ElementTree.parse(xml).iter('testcase'))
        xml.unlink()
        for outcome in ('failure', 'error', 'skipped'):
            of = [case for case in cases if case.find(outcome) is not None]
            run[outcome] = {
                f'{case.get("classname")}.{case.get("name")}': case.find(outcome).get('message', '')
                for case in of
            }
        run['passed'] = len(cases) - sum(len(run[k]) for k in ('failure', 'error', 'skipped'))
        run['seconds'] = sum(float(case.get('time')) for case in cases)
    return run | {'command': 'python -m pytest tests/cuda'}


def run_process(options: Sequence[str], deadline: float) -> dict:
    """Run Python with these options in the checkout. `failed`: why it did, or None."""
    try:
        done = subprocess.run(
            [sys.executable, *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=max(deadline - time.monotonic(), 1),
        )
    except subprocess.TimeoutExpired:
        return {'failed': 'the time limit of its part'}
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or 'no output').splitlines()
        return {'failed': f'exit status {done.returncode}: {lines[-1][:300]}'}
    return {'failed': None}


# The page


def write_page(folder: Path, device: str) -> None:
    """Write report.md from the results in the folder."""
    lines = ['# GPU report', '', *machine_lines(device)]
    for name, part in PARTS.items():
        if not (folder / f'{name}.json').exists():
            continue
        lines += ['', f'## {part.title}']
        for run in json.loads((folder / f'{name}.json').read_text())['runs']:
            lines += ['', f'`{run["command"]}`']
            if run['failed']:
                lines += ['', f'**Failed:** {run["failed"]}']
            lines += suite_lines(run) if 'passed' in run else []
            lines += case_lines(run.get('rows', []), run.get('rates', {}))
            if run.get('picture'):
                lines += ['', f'![time and memory over image size]({run["picture"]})']
    with atomic_write(folder / 'report.md') as file:
        file.write_text('\n'.join(lines) + '\n')


def machine_lines(device: str) -> list[str]:
    """GPU, driver and versions, as a table."""
    import torch

    facts = {'system': platform.platform(), 'Python': platform.python_version()}
    if device.startswith('cuda'):
        properties = torch.cuda.get_device_properties(device)
        facts['GPU'] = f'{properties.name}, {properties.total_memory / 2**30:.0f} GiB'
        facts['driver'] = driver()
        facts['CUDA of torch, cuDNN'] = f'{torch.version.cuda}, {torch.backends.cudnn.version()}'
    else:
        facts['device'] = device
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return markdown([('', ''), *facts.items()])


def driver() -> str:
    try:
        query = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return 'unknown'


def suite_lines(run: dict) -> list[str]:
    counts = [f'{run["passed"]} passed'] + [
        f'{len(run[outcome])} {word}'
        for outcome, word in (('failure', 'failed'), ('error', 'errors'), ('skipped', 'skipped'))
        if run[outcome]
    ]
    lines = ['', f'{", ".join(counts)} in {run["seconds"]:.0f} s.']
    for name, message in (run['failure'] | run['error']).items():
        first = (message.splitlines() or [''])[0]
        lines.append(f'- `{name}`: {first[:200]}')
    return lines


def case_lines(rows: Sequence[dict], rates: dict[str, dict[str, float]]) -> list[str]:
    """A table for each workload, and the rates that its floor is computed from."""
    lines, cases = [], {}
    for row in rows:
        case = tuple(row[field] for field in ('step', 'dtype', 'height', 'width', 'batch'))
        cases.setdefault(case, []).append(row)
    for dtype, of in rates.items():
        products = max(rate for name, rate in of.items() if name != 'copy')
        lines += ['', f'{dtype}: products {products:.0f} GFLOP/s, copy {of["copy"]:.0f} GB/s.']
    for (step, dtype, height, width, batch), of_case in cases.items():
        lines += ['', f'{step}, {dtype}, {height} x {width}, batch {batch}:', '']
        lines += markdown([TABLE, *map(cells, of_case)])
        for row in of_case:
            if row.get('profile'):
                shares = ', '.join(f'{share:.0%} {name}' for name, share in row['profile'].items())
                lines += ['', f'{row["model"]}: {shares}.']
    return lines


def cells(row: dict) -> list[str]:
    """A row of `TABLE`."""

    def shown(of: Callable[[], str]) -> str:
        try:
            return of()
        except (KeyError, TypeError):  # not measured
            return ''

    return [
        row['model'],
        shown(lambda: f'{row["ms"]:.1f}') or row.get('failed', ''),
        shown(lambda: f'{1e3 * row["batch"] / row["ms"]:.0f}'),
        shown(lambda: '{:.2f} ({:.2f} to {:.2f})'.format(row['ratio'], *row['ratio_spread'])),
        shown(lambda: f'{row["peak_mib"]:.0f}'),
        shown(lambda: f'{row["gflops"]:.1f}'),
        shown(lambda: f'{row["ms"] / row["floor_ms"]:.2f}'),
        shown(lambda: f'{row["difference"]:.0e}'),
        shown(lambda: str(row['graphs'])),
    ]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; the first row is its head."""
    head, *body = (f'| {" | ".join(row)} |' for row in rows)
    return [head, '|' + '---|' * len(rows[0]), *body]


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(gpu_report, argv, 'finished parts are in {out}; the same command continues')


if __name__ == '__main__':
    sys.exit(main())
