"""cpvt infer --ray, on a cluster of two cores, and models in other processes."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pandas
import psutil
import pytest
from PIL import Image
from support import ROOT, film, load_tool, photograph

from cpvt_pyramid.app.predict import Predictor, cluster

ray = pytest.importorskip('ray', reason='install the extra ray')
infer = load_tool('infer')
PAGE = (ROOT / 'docs/predict.md').read_text()
SIZES = ((90, 130), (64, 130), (120, 90), (90, 130), (64, 130), (70, 70))


@pytest.fixture(scope='module', autouse=True)
def _cluster() -> Iterator[None]:
    """One for all tests of this file. Its sockets need a folder with a short path."""
    with (
        TemporaryDirectory(prefix='ray', dir='/tmp', ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv('RAY_TMPDIR', folder)
        patch.setenv('RAY_DATA_DISABLE_PROGRESS_BARS', '1')
        cluster.start_or_join(ray, 'local')
        yield
        ray.shutdown()


def contents(folder: str) -> dict[str, bytes]:
    """The results in a folder."""
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name[0] != '.'}


def report(said: str) -> list[str]:
    """The last lines of a run, without its speed."""
    lines = said.splitlines()
    (start,) = [i for i, line in enumerate(lines) if ' done: results in ' in line]
    return [line for line in lines[start:] if 'per second' not in line]


def kill_first_worker(killed: list[int]) -> None:
    """When it has written a result."""
    while not any(Path('two').glob('*.detections.json')):
        time.sleep(0.01)
    for process in psutil.process_iter(['cmdline']):
        name = ' '.join(process.info['cmdline'] or [''])
        if name.startswith('ray::') and 'Worker' in name:
            process.kill()
            killed.append(process.pid)
            return


def test_images_and_a_killed_worker(model, capsys):
    """Of several sizes, one that cannot be read, and a video. The results are those of one process,
    although a worker is killed."""
    Path('in').mkdir()
    for i in range(12):
        Image.fromarray(photograph(*SIZES[i % 6], seed=i)).save(f'in/{i:02}.png')
    Path('in/void.png').touch()
    film('in/v.mp4', [photograph(96, 128, seed=i) for i in range(2)])
    command = [str(model('full')), 'in', '--score-thr', '0.01', '--out-dir']
    assert infer.main([*command, 'one']) == 1
    expected = capsys.readouterr().out.replace('in one', 'in two')
    killed: list[int] = []
    killer = threading.Thread(target=kill_first_worker, args=(killed,), daemon=True)
    killer.start()
    assert infer.main([*command, 'two', '--ray', 'local', '--ray-workers', '2']) == 1
    killer.join(1)
    assert killed
    out, err = capsys.readouterr()
    assert 'cpvt infer: skipped in/void.png: the file is empty' in err.splitlines()
    assert report(out) == report(expected)
    assert "note: 13 images or videos reached the model's limit of 2 boxes" in out
    assert contents('two') == contents('one')


def test_coco_and_what_an_earlier_run_has_written(model, capsys):
    Path('in').mkdir()
    for i in range(3):
        Image.fromarray(photograph(64, 96, seed=i)).save(f'in/{i}.png')
    command = [str(model('detection')), 'in', '--score-thr', '0.01', '--format', 'coco']
    command += ['--no-pictures', '--skip-existing', '--out-dir']
    assert infer.main([*command, 'one']) == 0
    Path('two').mkdir()
    shutil.copy('one/1.detections.json', 'two')
    capsys.readouterr()
    assert infer.main([*command, 'two', '--ray', 'local', '--ray-workers', '1']) == 0
    assert '1 of 3 are already done' in capsys.readouterr().out
    assert contents('two') == contents('one')


def test_a_full_disk_is_one_line(model, capsys):
    Path('full').mkdir()
    Path('full/.a.detections.json.partial').symlink_to('/dev/full')
    Image.fromarray(photograph(64, 96)).save('a.png')
    command = [str(model('detection')), 'a.png', '--no-pictures', '--out-dir', 'full']
    assert infer.main([*command, '--ray', 'local', '--ray-workers', '1']) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith('cpvt infer: in a worker of Ray: [Errno 28] No space left on device')
    assert not Path('full/a.detections.json').exists()


def test_a_terminated_run_ends_with_one_line(model):
    """And not with the stack of Ray, which aborts the process."""
    Path('in').mkdir()
    Image.fromarray(photograph(900, 900)).save('in/000.jpg')
    for i in range(1, 400):
        Path(f'in/{i:03}.jpg').hardlink_to('in/000.jpg')
    command = [sys.executable, '-m', 'cpvt_pyramid', 'infer', str(model('detection')), 'in']
    command += ['--ray', ray.get_runtime_context().gcs_address, '--ray-workers', '1']
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any(Path().glob('predictions/*.detections.json')):
        time.sleep(0.05)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert said.splitlines()[-1] == (
        'cpvt infer: terminated; finished results are in predictions; --skip-existing keeps them'
    )
    assert 'Fatal' not in said and 'SIGABRT' not in said


def test_the_example_of_the_page(model):
    """A model inside a pipeline of one's own; here with arrays."""
    examples = re.findall(r'^```python\n(.*?)^```', PAGE, re.M | re.S)
    (example,) = (each for each in examples if 'import ray' in each)
    for i in range(4):
        Image.fromarray(photograph(64, 96, seed=i)).save(f'{i}.png')
    path = str(model('detection').resolve())
    arguments = "'configs/retinanet_cpvt_s.py', 'retinanet.pth'"
    assert arguments in example
    example = example.replace(arguments, repr(path))
    example = example.replace('s3://bucket/photos', str(Path.cwd()))
    example = example.replace("write_parquet('found')", f"write_parquet('{Path.cwd()}/found')")
    names: dict = {}
    exec(example.replace('num_gpus=1', 'num_gpus=0'), names)
    tables = [pandas.read_parquet(path) for path in Path('found').glob('*.parquet')]
    table = pandas.concat(tables)
    assert sorted(Path(path).name for path in table['path']) == [f'{i}.png' for i in range(4)]
    predict = Predictor(path)
    for name, found in zip(table['path'], table['found']):
        assert json.loads(found) == predict(name).records()


def test_a_predictor_can_be_sent_to_other_processes(untrained):
    Image.fromarray(photograph(64, 96)).save('a.png')
    predict = Predictor(*untrained['segmentor'])
    expected = predict('a.png')
    found = pickle.loads(pickle.dumps(predict))('a.png')
    np.testing.assert_array_equal(found.labels, expected.labels)


def test_an_address_without_a_cluster(monkeypatch):
    """One that Ray gives up is shown with what Ray says."""
    with pytest.raises(cluster.UserError, match='no Ray cluster answers at 127.0.0.1:1: .*refused'):
        cluster.start_or_join(ray, '127.0.0.1:1')
    monkeypatch.setattr(ray, 'init', mock.Mock(side_effect=ConnectionError('Failed to\n\nconnect')))
    with pytest.raises(
        cluster.UserError, match='no Ray cluster answers at auto: Failed to connect$'
    ):
        cluster.start_or_join(ray, 'auto')
