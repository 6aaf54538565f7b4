"""infer.py --ray and BatchPredictor, on a cluster of two cores."""

import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import psutil
import pytest
from PIL import Image
from support import film, load_tool, photograph

from cpvt_pyramid.predict.openmmlab import cluster
from cpvt_pyramid.predict.openmmlab.batch_predictor import BatchPredictor

ray = pytest.importorskip('ray', reason='install the extra ray')
infer = load_tool('infer')
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
        cluster.start_or_join(ray, True)
        yield
        ray.shutdown()


def contents(folder: str) -> dict[str, bytes]:
    """The results in a folder."""
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name[0] != '.'}


def kill_first_worker(killed: list[int]) -> None:
    """When it has written a result."""
    while not any(Path('two').glob('*.detections.json')):
        time.sleep(0.01)
    for process in psutil.process_iter(['cmdline']):
        name = ' '.join(process.info['cmdline'] or [''])
        if name.startswith('ray::') and 'ImageWriter' in name:
            process.kill()
            killed.append(process.pid)
            return


def test_images_and_a_killed_worker(untrained, capsys):
    """Of several sizes, one that cannot be read, and a video. The results are those of one process,
    although a worker is killed."""
    Path('in').mkdir()
    for i in range(12):
        Image.fromarray(photograph(*SIZES[i % 6], seed=i)).save(f'in/{i:02}.png')
    Path('in/void.png').touch()
    film('in/v.mp4', [photograph(96, 128, seed=i) for i in range(2)])
    command = [*untrained['detector'], 'in', '--score-thr', '0.01', '--out-dir']
    assert infer.main([*command, 'one']) == 1
    expected = capsys.readouterr().out.replace('in one', 'in two')
    killed: list[int] = []
    killer = threading.Thread(target=kill_first_worker, args=(killed,), daemon=True)
    killer.start()
    assert infer.main([*command, 'two', '--ray', '--ray-workers', '2']) == 1
    killer.join(1)
    assert killed
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == 'cpvt infer: skipped in/void.png: the file is empty'
    assert out[out.index('13 of 14 done') :] == expected[expected.index('13 of 14 done') :]
    assert contents('two') == contents('one')


def test_images_and_videos_alone():
    """A worker takes some images at a time, and a video."""
    images = [(Path(f'{i}.png'), str(i)) for i in range(40)]
    videos = [(Path(f'{i}.mp4'), str(i)) for i in range(3)]
    for named, blocks in ((images, 8), (images[:3], 3), (videos, 3), ([*videos, *images], 11)):
        found = mock.MagicMock(return_value=[])
        with mock.patch.object(cluster.Cluster, 'results', found):
            two = cluster.Cluster(ray, 2, 0)
            assert cluster.write_images_on(two, {'batch_size': 1}, named, Path(), True) == {}
        writer, rows = found.call_args.args
        assert writer is cluster.ImageWriter and rows.num_blocks() == blocks
        expected = sorted(str(path) for path, _ in named)
        assert sorted(row['path'] for row in rows.take_all()) == expected


def test_rows_of_tiles(untrained, capsys):
    """Two bands of one image, and a file that is none."""
    Path('in').mkdir()
    Image.fromarray(photograph(400, 150)).save('in/a.png')
    Path('in/void.png').touch()
    command = [*untrained['segmentor'], 'in', '--tile', '128', '--overlap', '96', '--out-dir']
    assert infer.main([*command, 'one']) == 1
    assert infer.main([*command, 'two', '--ray', '--ray-workers', '2']) == 1
    assert 'skipped in/void.png: not a complete image' in capsys.readouterr().err
    assert contents('two') == contents('one')


def test_a_full_disk_is_one_line(untrained, capsys):
    Path('full').mkdir()
    Path('full/.a.detections.json.partial').symlink_to('/dev/full')
    Image.fromarray(photograph(64, 96)).save('a.png')
    command = [*untrained['detector'], 'a.png', '--no-pictures', '--out-dir', 'full', '--ray']
    assert infer.main([*command, '--ray-workers', '1']) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith('cpvt infer: in a worker of Ray: [Errno 28] No space left on device')
    assert not Path('full/a.detections.json').exists()


def test_a_predictor_in_ray_data(untrained):
    """Arrays of several sizes, in batches of any size."""
    images = [photograph(*size, seed=i) for i, size in enumerate(SIZES)]
    predict = BatchPredictor(*untrained['detector'], score_thr=0.01)
    found = predict({'image': images, 'number': list(range(6))})
    rows = [{'image': image, 'number': i} for i, image in enumerate(images)]
    table = ray.data.from_items(rows).map_batches(
        BatchPredictor,
        fn_constructor_args=untrained['detector'],
        fn_constructor_kwargs={'score_thr': 0.01},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_size=4,
    )
    for row in table.take_all():
        expected = {name: found[name][row['number']] for name in row}
        assert row == expected and len(json.loads(row['records'])) > 3


def test_a_predictor_in_a_pool(untrained, monkeypatch):
    """It is sent with each batch, and its model is loaded once in each process."""
    Path('in').mkdir()
    for i in range(3):
        Image.fromarray(photograph(64, 96, seed=i)).save(f'in/{i}.png')
    Path('in/void.png').touch()
    predict = BatchPredictor(*untrained['segmentor'])
    batches = [{'path': ['in/0.png', 'in/void.png']}, {'path': ['in/1.png', 'in/2.png']}]
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        first, second = pool.map(predict, batches)
    assert first['error'].tolist() == ['', 'the file is empty']
    for batch, found in zip(batches, (first, second)):
        expected = predict(batch)
        assert found.keys() == expected.keys() == {'path', 'records', 'pixels', 'error'}
        for name in found:
            assert found[name].tolist() == expected[name].tolist()
    assert second['pixels'][0][:4] == b'\x89PNG'


def test_a_predictor_in_spark(untrained):
    """Here without Spark, in the form in which mapInPandas calls it."""
    pandas = pytest.importorskip('pandas')
    Image.fromarray(photograph(64, 96)).save('a.png')
    predict = BatchPredictor(*untrained['detector'], score_thr=0.01)
    frame = pandas.DataFrame({'path': ['a.png', 'none.png']})
    found = pandas.DataFrame(predict({'path': frame['path'].to_numpy()}))
    assert found['error'].tolist() == ['', 'no such file']
    assert len(json.loads(found['records'][0])) > 3


def test_an_address_without_a_cluster(monkeypatch):
    """One that Ray gives up is shown with what Ray says."""
    with pytest.raises(cluster.UserError, match='no Ray cluster answers at 127.0.0.1:1: .*refused'):
        cluster.start_or_join(ray, '127.0.0.1:1')
    monkeypatch.setattr(ray, 'init', mock.Mock(side_effect=ConnectionError('Failed to\n\nconnect')))
    with pytest.raises(
        cluster.UserError, match='no Ray cluster answers at auto: Failed to connect$'
    ):
        cluster.start_or_join(ray, 'auto')
