#!/usr/bin/env python
"""Runs the commands of docs/performance_notes.md and writes what they print into one Markdown page.

    make gpu-report                                               # tests/cuda, too
    make cpu-report
    python tools/benchmarks/report.py --device cuda --parts inference whole-models

The page is written after each command. A command whose output is in the page does not run again: an
interrupted report continues, and deleting the page repeats it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from cpvt_pyramid.tooling.command import UserError, run_command  # noqa: E402
from cpvt_pyramid.tooling.files import make_folder, write_text  # noqa: E402

MINUTES = 30  # time limit of a command
GRACE = 30  # seconds for a process that is interrupted

DOCTOR = ('-m cpvt_pyramid.doctor',)  # prints the machine and the versions
S, PARTS = 'tools/benchmarks/speed.py', 'tools/benchmarks/parts.py'
BOTH, DTYPES = '--steps forward train', '--dtypes float32 tf32 bfloat16 float16'
RETINANET, FPN = 'configs/retinanet_cpvt_s.py', 'configs/semantic_fpn_cpvt_s.py'
REPORTS = {
    'cuda': {
        'tests': ('-m pytest tests/cuda',),
        'inference': (
            f'{S} --sizes 224 --batch 128 {BOTH} --dtypes bfloat16 --with-cp',
            f'{S} --sizes 512 --batch 8 {BOTH} {DTYPES} --with-cp',
            f'{S} --sizes 800x1344 --batch 2 {BOTH} {DTYPES} --with-cp',
        ),
        'windows': (
            f'{S} --arch svt_small --sizes 224 --batch 128 {BOTH} --dtypes bfloat16 --with-cp',
            f'{S} --arch svt_small --sizes 448 --batch 8 {BOTH} --dtypes float32 bfloat16 '
            '--with-cp',
            f'{S} --arch svt_small --sizes 896x1344 --batch 2 {BOTH} --dtypes bfloat16 --with-cp',
        ),
        'compiled': (
            f'{S} --sizes 512 800x1344 --batch 2 --dtypes bfloat16 --compile --models ours timm',
            f'{S} --arch svt_small --sizes 448 --batch 8 --dtypes bfloat16 --compile '
            '--models ours timm',
        ),
        'peers': (
            f'{S} --sizes 224 448 896 1344 --batch 4 {BOTH} --dtypes bfloat16 '
            '--models ours timm mmseg mmdet pvt_v2_b2 swin_tiny convnext_tiny resnet50 '
            '--plot FOLDER/peers.png',
        ),
        'whole-models': (
            f'{S} --config {RETINANET} --sizes 800x1344 --batch 2 {BOTH}',
            f'{S} --config {FPN} --sizes 512 --batch 8 {BOTH}',
        ),
    },
    'cpu': {
        'throughput': tuple(
            f'tools/benchmarks/throughput.py {config} --folder FOLDER/throughput'
            for config in (RETINANET, FPN)
        ),
        'runtimes': tuple(
            f'{S} --arch {arch} --models ours timm --runtimes --no-memory {options}'
            for options in ('--sizes 512 --dtypes float32 bfloat16', '--sizes 800x1344 --rounds 3')
            for arch in ('pcpvt_small', 'svt_small')
        ),
        'training': (
            f'{S} --arch pcpvt_small --sizes 512 {BOTH} --with-cp --rounds 5',
            f'{S} --arch svt_small --sizes 448 {BOTH} --with-cp --rounds 5',
            f'{S} --arch pcpvt_small --sizes 800x1344 {BOTH} --with-cp --rounds 3',
            f'{S} --arch svt_small --sizes 896x1344 {BOTH} --with-cp --rounds 3',
            f'{S} --arch svt_small --models ours timm --sizes 800x1344 --steps train --with-cp '
            '--rounds 1',
        ),
        'busy': (f'{S} --arch svt_small --sizes 512 --busy --rounds 3 --no-memory',),
        'whole-models': (
            f'{PARTS} {FPN} --size 512',
            f'{PARTS} {RETINANET} --size 800x1344 --rounds 1',
            f'{S} --config {RETINANET} --models ours mmseg --sizes 800x1344 --steps train '
            '--rounds 1',
        ),
        'compiled': tuple(
            f'{S} --models ours timm --no-memory --compile --rounds 5 {options}'
            for options in ('--sizes 512 800x1344', '--sizes 512 --steps train')
        ),
        'peers': (
            f'{S} --models ours timm swin_tiny convnext_tiny resnet50 '
            '--sizes 224 448 896 1344 2048 --rounds 2 --plot FOLDER/peers.png',
            f'{S} --models ours mmseg mmdet pvt_v2_b2 --sizes 224 448 896 1344 --rounds 2',
        ),
    },
}


def report(
    *, device: Literal[tuple(REPORTS)], parts: Sequence[str] = (), out: str | None = None
) -> int:
    """Run the commands that the page does not have yet.

    Args:
        device: what to measure
        parts: which to run; all by default
        out (FOLDER): folder of report.md; by default work_dirs/gpu-report or work_dirs/cpu-report
    """
    import torch

    known = REPORTS[device]
    if unknown := set(parts) - set(known):
        raise UserError(f'no part {min(unknown)}; one of {", ".join(known)}')
    if device == 'cuda' and not torch.cuda.is_available():
        raise UserError('this torch finds no GPU; python -m cpvt_pyramid.doctor tells you why')
    folder = make_folder(out or f'work_dirs/{"gpu" if device == "cuda" else device}-report')
    page = folder / 'report.md'
    text = page.read_text() if page.exists() else f'# Report: {device}\n'
    failures = 0
    for part, commands in (('machine', DOCTOR), *((part, known[part]) for part in parts or known)):
        for command in commands:
            command = command.replace('FOLDER', str(folder))
            command += ' --device cuda' * (device == 'cuda' and command.startswith(S))
            if f'$ python {command}\n' in text:
                continue
            print(f'{part}: {command}', flush=True)
            output, failed = run_process(command.split())
            failures += bool(failed)
            title = '' if f'\n## {part}\n' in text else f'\n## {part}\n'
            text += f'{title}\n```\n$ python {command}\n{output}\n```\n'
            text += f'\n**Failed:** {failed}\n' if failed else ''
            if (folder / f'{part}.png').exists() and '--plot' in command:
                text += f'\n![time and memory over image size]({part}.png)\n'
            write_text(page, text)
    print(page)
    return min(failures, 1)


def run_process(options: Sequence[str], seconds: float = 60 * MINUTES) -> tuple[str, str | None]:
    """Run Python with these options in the checkout: what it printed, and why it failed, or None.

    After `seconds` it is interrupted, as by Ctrl-C: it ends its own processes.
    """
    limit = ['timeout', '--foreground', '--signal=INT', f'--kill-after={GRACE}', str(seconds)]
    done = subprocess.run(
        [*limit, sys.executable, *options], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode in (124, 137):
        failed = f'the time limit of {seconds / 60:.0f} minutes'
    elif done.returncode:
        last = (done.stderr.strip().splitlines() or ['no message'])[-1]
        failed = f'exit status {done.returncode}: {last[:300]}'
    return done.stdout.strip(), failed if done.returncode else None


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(report, argv, 'the same command continues')


if __name__ == '__main__':
    sys.exit(main())
