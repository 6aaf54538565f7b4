"""Runs the commands of benchmarks/notes.md and writes what they print into one Markdown page.

    make gpu-report                                               # tests/cuda, too
    make cpu-report
    python -m benchmarks.report --device cuda --parts inference whole-models

The page is written after each command. A command whose output is in the page does not run again: an
interrupted report continues, and deleting the page repeats it. With --minutes, the report ends by
itself with exit status 75 if commands are left.
"""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Literal

from benchmarks import ROOT
from cpvt_pyramid.tooling.command import STOPPED, UserError, run_command
from cpvt_pyramid.tooling.files import make_folder, write_text

MINUTES = {'cuda': 5, 'cpu': 30}  # time limit of a command
GRACE = 30  # seconds for a process that is interrupted

SPEED = '-m benchmarks.speed'
PARTS = '-m benchmarks.parts'
THROUGHPUT = '-m benchmarks.throughput'
BUSY = '-m benchmarks.busy'
# Their options.
SVT = '--arch svt_small'
PAIR = '--models ours timm'
BOTH = '--steps forward train'
DTYPES = '--dtypes float32 tf32 bfloat16 float16'
RETINANET = 'configs/retinanet_cpvt_s.py'
FPN = 'configs/semantic_fpn_cpvt_s.py'
# The commands of each part, one per line.
REPORTS = {
    'cuda': {
        'machine': '-m cpvt_pyramid.doctor',
        'tests': """
            -m pytest -n 8 tests/cuda/test_core.py -k "not compiled"
            -m pytest -n 8 tests/cuda/test_core.py -k compiled
            -m pytest -n 8 tests/cuda/test_mm.py tests/cuda/test_distributed.py
        """,
        'inference': f"""
            {SPEED} --sizes 224 --batch 128 {BOTH} --dtypes bfloat16 --with-cp
            {SPEED} --sizes 512 --batch 8 {BOTH} {DTYPES} --with-cp
            {SPEED} --sizes 800x1344 --batch 2 {BOTH} {DTYPES} --with-cp
        """,
        'windows': f"""
            {SPEED} {SVT} --sizes 224 --batch 128 {BOTH} --dtypes bfloat16 --with-cp
            {SPEED} {SVT} --sizes 448 --batch 8 {BOTH} --dtypes float32 bfloat16 --with-cp
            {SPEED} {SVT} --sizes 896x1344 --batch 2 {BOTH} --dtypes bfloat16 --with-cp
        """,
        'compiled': f"""
            {SPEED} --sizes 512 800x1344 --batch 2 --dtypes bfloat16 --compile {PAIR}
            {SPEED} {SVT} --sizes 448 --batch 8 --dtypes bfloat16 --compile {PAIR}
        """,
        'peers': f"""
            {SPEED} --sizes 224 448 896 1344 --batch 4 {BOTH} --dtypes bfloat16 {PAIR} mmseg \
                mmdet pvt_v2_b2 swin_tiny convnext_tiny resnet50 --plot FOLDER/peers.png
        """,
        'whole-models': f"""
            {SPEED} --config {RETINANET} --sizes 800x1344 --batch 2 {BOTH}
            {SPEED} --config {FPN} --sizes 512 --batch 8 {BOTH}
        """,
    },
    'cpu': {
        'machine': '-m cpvt_pyramid.doctor',
        'throughput': f"""
            {THROUGHPUT} {RETINANET} --count 16 --folder FOLDER/throughput
            {THROUGHPUT} {FPN} --count 16 --folder FOLDER/throughput
        """,
        'runtimes': f"""
            {SPEED} {PAIR} --runtimes --no-memory --sizes 512 --dtypes float32 bfloat16
            {SPEED} {SVT} {PAIR} --runtimes --no-memory --sizes 512 --dtypes float32 bfloat16
            {SPEED} {PAIR} --runtimes --no-memory --sizes 800x1344 --rounds 3
            {SPEED} {SVT} {PAIR} --runtimes --no-memory --sizes 800x1344 --rounds 3
        """,
        'training': f"""
            {SPEED} --arch pcpvt_small --sizes 512 {BOTH} --with-cp --rounds 5
            {SPEED} {SVT} --sizes 448 {BOTH} --with-cp --rounds 5
            {SPEED} --arch pcpvt_small --sizes 800x1344 {BOTH} --with-cp --rounds 3
            {SPEED} {SVT} --sizes 896x1344 {BOTH} --with-cp --rounds 3
            {SPEED} {SVT} {PAIR} --sizes 800x1344 --steps train --with-cp --rounds 1
        """,
        'busy': f'{BUSY} {SVT} --size 512 --rounds 3',
        'whole-models': f"""
            {PARTS} {FPN} --size 512
            {PARTS} {RETINANET} --size 800x1344 --rounds 1
            {SPEED} --config {RETINANET} --models ours mmseg --sizes 800x1344 \
                --steps train --rounds 1
        """,
        'compiled': f"""
            {SPEED} {PAIR} --no-memory --compile --rounds 5 --sizes 512 800x1344
            {SPEED} {PAIR} --no-memory --compile --rounds 5 --sizes 512 --steps train
        """,
        'peers': f"""
            {SPEED} --models ours timm swin_tiny convnext_tiny resnet50 \
                --sizes 224 448 896 1344 2048 --rounds 2 --plot FOLDER/peers.png
            {SPEED} --models ours mmseg mmdet pvt_v2_b2 --sizes 224 448 896 1344 --rounds 2
        """,
    },
}


def report(
    *,
    device: Literal[tuple(REPORTS)],
    parts: Sequence[str] = (),
    out: str | None = None,
    minutes: float | None = None,
) -> int:
    """Run the commands that the page does not have yet.

    Args:
        device: what to measure
        parts: which to run; all by default
        out: folder of report.md; by default work_dirs/gpu-report or work_dirs/cpu-report
        minutes: for this call; a command starts only if its time limit ends before, which is
            5 minutes on a GPU and 30 on a CPU

    Returns:
        The exit status: 1 if a command failed, 75 if time was short; the same call continues.
    """
    import torch

    known = REPORTS[device]
    limit = MINUTES[device]
    if minutes is not None and minutes < limit:
        raise UserError(
            f'--minutes must be at least {limit}, the limit of a command, got {minutes}'
        )
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    if unknown := set(parts) - set(known):
        raise UserError(f'no part {min(unknown)}; one of {", ".join(known)}')
    if device == 'cuda' and not torch.cuda.is_available():
        raise UserError('this torch finds no GPU; cpvt doctor tells you why')
    name = 'gpu' if device == 'cuda' else device
    folder = make_folder(out or f'work_dirs/{name}-report')
    page = folder / 'report.md'
    text = page.read_text() if page.exists() else f'# Report: {device}\n'
    failures = 0
    has_run = False  # a call runs at least one command
    chosen = ['machine', *parts] if parts else list(known)
    for part in chosen:
        for line in known[part].strip().splitlines():
            command = ' '.join(line.split()).replace('FOLDER', str(folder))
            if device == 'cuda' and command.startswith(SPEED):
                command += ' --device cuda'
            if f'$ python {command}\n' in text:
                continue
            if has_run and time.monotonic() + 60 * limit > end:
                print(f'{page}: {minutes:g} minutes are over; the same command continues')
                return STOPPED
            print(f'{part}: {command}', flush=True)
            output, failed = run_process(shlex.split(command), 60 * limit)
            has_run = True
            title = f'\n## {part}\n'
            if title not in text:
                text += title
            text += f'\n```\n$ python {command}\n{output}\n```\n'
            if failed:
                failures += 1
                text += f'\n**Failed:** {failed}\n'
            if (folder / f'{part}.png').exists() and '--plot' in command:
                text += f'\n![time and memory over image size]({part}.png)\n'
            write_text(page, text)
    print(page)
    return min(failures, 1)


def run_process(options: Sequence[str], seconds: float) -> tuple[str, str | None]:
    """Run Python with these options in the checkout: what it printed, and why it failed, or None.

    After `seconds` it is interrupted, as by Ctrl-C: it ends its own processes.
    """
    limit = ['timeout', '--foreground', '--signal=INT', f'--kill-after={GRACE}', str(seconds)]
    environment = dict(os.environ)
    if 'pytest' in options:  # its processes share the cores
        environment['OMP_NUM_THREADS'] = '1'
    done = subprocess.run(
        [*limit, sys.executable, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    output = done.stdout.strip()
    if done.returncode in (124, 137):
        return output, f'the time limit of {seconds / 60:.0f} minutes'
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ['no message'])[-1]
        return output, f'exit status {done.returncode}: {last[:300]}'
    return output, None


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(report, argv, 'the same command continues')


if __name__ == '__main__':
    sys.exit(main())
