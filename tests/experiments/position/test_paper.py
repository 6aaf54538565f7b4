"""The CPVT paper's experiment: its photographs, its trainings, its claims."""

import gzip
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel
from support import ROOT

from cpvt_pyramid.position import PEGConfig
from experiments import runs
from experiments.position import __main__ as tool
from experiments.position import classifiers, fashion, laboratory, paper
from experiments.position.classifiers import ClassifierSettings
from experiments.position.fashion import read_fashion
from experiments.position.laboratory import PAPER_PRESETS, PRESETS, Lab, Trained, Variant
from experiments.runs import Result, path_of, run
from experiments.statistics import Estimate

SMOKE = ['paper', '--preset', 'smoke', '--workers', '1']
IMAGES, LABELS = 't10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte'


def settings_with(photographs, **options):
    options = dict(steps=2, batch=4, pictures=8, resized=4, sizes=(28, 36)) | options
    return ClassifierSettings(data=str(photographs), **options)


# The photographs


def test_the_files_are_read(photographs, tmp_path):
    splits = read_fashion(str(photographs))
    assert [len(splits[name].labels) for name in ('train', 'tuning', 'test')] == [55, 5, 20]
    for photos in splits.values():
        assert photos.images.dtype == torch.uint8 and photos.images.shape[1:] == (1, 28, 28)
        means = photos.images.double().mean((1, 2, 3))
        assert torch.equal((means / 20).floor().long(), photos.labels)
    assert splits['tuning'].labels.tolist() == [5, 6, 7, 8, 9]  # the last of the training files
    for name in fashion.PINNED:  # the same, not compressed
        (tmp_path / name).write_bytes(gzip.decompress((photographs / f'{name}.gz').read_bytes()))
    assert torch.equal(read_fashion(str(tmp_path))['test'].images, splits['test'].images)


def damaged(path, how):
    content = path.read_bytes()
    if how == 'missing':
        path.unlink()
    elif how == 'cut':
        path.write_bytes(content[: len(content) // 2])
    elif how == 'empty':
        path.write_bytes(b'')
    elif how == 'not gzip':
        path.write_text('<html>')
    elif how == 'broken stream':
        path.write_bytes(content[:30] + bytes(30) + content[60:])
    else:  # of another data set
        values = bytearray(gzip.decompress(content))
        values[-1] ^= 1
        path.write_bytes(gzip.compress(bytes(values)))


@pytest.mark.parametrize(
    'how, complaint',
    [
        ('missing', f'there is no {IMAGES} or {IMAGES}.gz in'),
        ('cut', 'cannot read'),
        ('empty', 'the SHA-256 of what is in'),
        ('not gzip', 'cannot read'),
        ('broken stream', 'cannot read'),
        ('other', 'damaged, or of another data set'),
    ],
)
def test_damaged_files(how, complaint, photographs, tmp_path, capsys):
    """One line, with the command that gets the files, before anything is written."""
    folder = tmp_path / 'data'
    shutil.copytree(photographs, folder)
    damaged(folder / f'{IMAGES}.gz', how)
    words = ['--data', str(folder), '--work-dir', str(tmp_path / 'work')]
    assert tool.main([*SMOKE, *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert complaint in error and str(folder) in error
    assert 'apt-get download dataset-fashion-mnist && dpkg -x' in error
    assert not (tmp_path / 'work').exists()


def test_a_file_that_must_not_be_read(photographs, monkeypatch, tmp_path, capsys):
    shutil.copytree(photographs, tmp_path / 'data')

    def refuse(path, *rest):
        raise PermissionError(13, 'Permission denied', str(path))

    monkeypatch.setattr(gzip, 'open', refuse)
    assert tool.main([*SMOKE, '--data', str(tmp_path / 'data')]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert 'permission denied for' in error


def test_training_photographs(photographs):
    """They depend on seed and step alone, change with both, and come from the training split."""
    settings = settings_with(photographs, batch=40)
    torch.manual_seed(1)
    images, labels = settings.draw(3)
    torch.manual_seed(2)
    again, same = settings.draw(3)
    assert torch.equal(images, again) and torch.equal(labels, same)
    assert images.dtype == torch.uint8 and images.shape == (40, 1, 28, 28)
    # Crops keep the mean, which tells the class.
    assert torch.equal((images.double().mean((1, 2, 3)) / 20).floor().long(), labels)
    for other in (settings.draw(4), replace(settings, seed=1).draw(3)):
        assert not torch.equal(other[0], images)
    before = torch.get_rng_state()
    settings.draw(0)
    assert torch.equal(torch.get_rng_state(), before)


# The trainings


def test_an_interrupted_run_gives_the_same_result(photographs, tmp_path):
    settings = settings_with(photographs)
    whole = run(settings, tmp_path / 'whole')
    folder = tmp_path / 'interrupted'
    with (
        mock.patch.object(runs, 'write_text', side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        run(settings, folder)
    assert not list(folder.glob('*.json'))
    again = run(settings, folder)
    assert again.metrics == whole.metrics and again.losses == whole.losses
    assert set(again.metrics) == {'accuracy', '28 px', '36 px'}


def test_where_the_data_lies_changes_nothing(photographs, tmp_path):
    settings = settings_with(photographs)
    assert path_of(settings, tmp_path) == path_of(replace(settings, data='elsewhere'), tmp_path)
    assert path_of(settings, tmp_path) != path_of(replace(settings, least_area=0.5), tmp_path)
    run(settings, tmp_path)
    assert str(photographs) not in path_of(settings, tmp_path).read_text()


def test_every_row_trains(photographs):
    """And no parameter is idle but those of the PEG that is fixed."""
    for name, variant in paper.all_rows().items():
        settings = settings_with(
            photographs,
            position=variant.position,
            peg=variant.peg,
            options=variant.options,
            class_token=variant.class_token,
        )
        model = settings.build()
        settings.loss(model, 0).backward()
        fixed = [n for n, p in model.named_parameters() if not p.requires_grad]
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad), name
        assert [n.split('.')[0] for n in fixed] == ['pos_block'] * 2 * (name == paper.FROZEN)
        assert (model.cls_token is None) == name.endswith(paper.GAP)


def test_blocks_of_the_paper():
    assert [paper.paper_block(i) for i in (-1, 0, 3, 6, 10)] == [-1, 0, 1, 3, 4]
    assert paper.after(*range(6)) == (('after', (0, 1, 2)),)
    models = {}
    for name, variant in paper.all_rows().items():
        models[name] = ClassifierSettings(position=variant.position, peg=variant.peg).build()
    assert list(models[paper.FIRST_HALF].pos_block) == ['0', '1', '2']
    assert list(models[paper.POINTWISE].pos_block) == ['0', '1', '2', '3', '4']
    assert models[paper.COVERS].pos_block['-1'].proj[0].kernel_size == (27, 27)


def test_parameters_by_hand():
    none = paper.parameters_of(Variant('none'))
    added = {
        name: paper.parameters_of(variant) - none for name, variant in paper.all_rows().items()
    }
    assert added[paper.LEARNED] == 14 * 14 * 32 + 32  # and the class token's
    assert added[paper.PEG] == added[paper.FROZEN] == 32 * (9 + 1)  # weights and bias
    assert added[paper.FIRST_HALF] == 3 * 32 * (9 + 1)
    assert added[paper.COVERS] == 32 * (27 * 27 + 1)
    assert added[paper.POINTWISE] == 5 * (32 * 32 + 32)
    assert added[paper.SINCOS] == added[paper.ROPE] == 0


def test_the_accuracy_of_a_model_that_reads_the_mean(photographs, monkeypatch):
    """At every size, in batches that do not divide the photographs; another one is right as often
    as its class occurs."""
    monkeypatch.setattr(classifiers, 'EVALUATED', 14 * 14 * 3)

    class Reader(torch.nn.Module):
        arch = classifiers.ARCH
        wrong = False

        def forward(self, x):
            classes = ((x.mean((1, 2, 3)) + 1) * 127.5 / 20).floor().long().clamp(0, 9)
            if self.wrong:
                classes[:] = 3
            return torch.nn.functional.one_hot(classes, 10)

    settings = settings_with(photographs, pictures=20, resized=10, sizes=(28, 48))
    reader = Reader()
    assert settings.evaluate(reader) == {'accuracy': 1, '28 px': 1, '48 px': 1}
    reader.wrong = True
    found = settings.evaluate(reader)
    assert found['accuracy'] == 0.1 and found['28 px'] == found['48 px']


def test_resizing_is_bicubic():
    image = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    image[..., 14:] = 200
    large = classifiers.resized(image, 56)
    assert large.shape == (1, 1, 56, 56) and large.dtype == torch.uint8
    row = large[0, 0, 20].int()
    assert row[0] == 0 and row[-1] == 200
    assert row.max() > 200  # bicubic interpolation overshoots, bilinear does not
    assert classifiers.resized(image, 28) is image


# The claims


def test_claims_are_about_rows_that_are_trained():
    rows = paper.all_rows()
    sides = paper.sides_of(Lab(PAPER_PRESETS['default'], Path('.')))
    assert sides == [28, 36, 42, 48, 56, 64]
    at_other_sizes = {classifiers.size_name(side) for side in sides}
    claims = paper.OF_SIZES + paper.OF_TRAINING_SIZE
    assert len({claim.text for claim in claims}) == len(claims)
    for claim in claims:
        for name, metric in (claim.value, claim.base):
            known = {'accuracy'} | (set() if name in paper.ABLATIONS else at_other_sizes)
            assert name in rows and metric in known
    assert set(PAPER_PRESETS) == set(PRESETS)


def test_figures_of_the_paper():
    """The claims at the training size are differences of the rows' figures, which are those of
    `PEGConfig`."""
    rows = paper.all_rows()
    for claim in paper.OF_TRAINING_SIZE:
        first, second = (
            rows[name].paper.replace('about ', '') for name, _ in (claim.value, claim.base)
        )
        if math.isnan(claim.paper):
            assert not first and claim.sign == -1
        else:
            assert claim.paper == pytest.approx(float(first) - float(second), abs=1e-6)
    for name in paper.ABLATIONS:
        assert rows[name].paper in PEGConfig.__doc__


def claim_of(points, sign=None):
    claim = paper.between('a', 'b', points)
    return claim if sign is None else claim._replace(sign=sign)


@pytest.mark.parametrize(
    'points, mean, half, p, expected',
    [
        (1.2, 0.02, 0.005, 0.01, 'agrees'),
        (1.2, -0.02, 0.01, 0.01, 'contradicts'),
        (-1.2, -0.02, 0.005, 0.01, 'agrees'),
        (-1.5, -0.51, 0.051, 0.001, 'same direction'),
        (-4.0, -0.12, 0.02, 0.001, 'agrees'),  # three times as large
        (-4.0, -0.121, 0.02, 0.001, 'same direction'),
        (4.0, 0.013, 0.002, 0.01, 'same direction'),  # less than a third
        (4.0, 0.013, 0.03, 0.01, 'agrees'),  # the paper's is in the interval
        (1.2, 0.02, 0.03, 0.2, 'cannot tell'),
        (1.2, 0.012, 0.03, 0.2, 'cannot tell'),  # equal, but it could be 0
        (1.2, 0.02, 0.0, math.nan, 'cannot tell'),  # equal runs
        (0.1, 0.002, 0.004, math.nan, 'agrees'),  # within a point
        (0.1, 0.002, 0.02, math.nan, 'cannot tell'),
        (0.1, 0.03, 0.01, math.nan, 'contradicts'),
        (-0.1, -0.03, 0.01, math.nan, 'contradicts'),
    ],
)
def test_verdicts(points, mean, half, p, expected):
    claim = claim_of(points)
    assert paper.verdict(claim, Estimate(mean, half, 3), p) == expected
    assert paper.verdict(claim, Estimate(mean, half, 2), p) == 'cannot tell'
    assert paper.verdict(claim, Estimate(mean, math.nan, 1), math.nan) == 'cannot tell'


def row_of(name, accuracies):
    made = []
    for seed, accuracy in accuracies.items():
        settings = ClassifierSettings(seed=seed)
        made.append(Result(settings, {'accuracy': accuracy}, [1.0, 0.5], '', 0.0))
    return Trained(name, Variant('peg'), made)


def test_undirected_claims_do_not_count_in_the_correction():
    seeds = {0: 0.0, 1: 0.002, 2: -0.001}
    rows = {
        'a': row_of('a', {seed: 0.9 + noise for seed, noise in seeds.items()}),
        'b': row_of('b', dict.fromkeys(seeds, 0.88)),
    }
    alone = paper.claims_table(rows, [claim_of(1.2)], 'x').rows
    both = paper.claims_table(rows, [claim_of(1.2), claim_of(0.0)], 'x').rows
    assert alone[0][4] == both[0][4] and both[1][4] == ''
    assert alone[0][1:4] == ['+1.2', '+2.0', '+1.7 to +2.4']
    unknown = paper.claims_table(rows, [claim_of(math.nan, -1)], 'x').rows
    assert unknown[0][1] == 'worse' and unknown[0][5] == 'contradicts'
    better = paper.claims_table(rows, [claim_of(math.nan, 1)], 'x').rows
    assert better[0][5] == 'same direction'


# The command


@pytest.fixture(scope='module')
def answered(photographs, tmp_path_factory):
    folder = tmp_path_factory.mktemp('lab')
    words = ['--data', str(photographs), '--seed', '3', '--seeds', '1', '--work-dir', str(folder)]
    assert tool.main([*SMOKE, *words]) == 0
    return folder


def test_the_answer_is_whole(answered, photographs):
    text = (answered / 'paper.json').read_text()
    assert str(photographs) not in text
    found = json.loads(text)
    assert [row['name'] for row in found['data']] == list(paper.all_rows())
    for row in found['data']:
        assert [one['settings']['seed'] for one in row['runs']] == [3]
        assert {one['settings']['split'] for one in row['runs']} == {'test'}
    of_sizes, of_training, sizes, changes, rows, against = found['tables']
    assert len(of_sizes['rows']) == len(paper.OF_SIZES)
    assert len(of_training['rows']) == len(paper.OF_TRAINING_SIZE)
    assert [row[0] for row in rows['rows']] == list(paper.all_rows())
    assert len(sizes['rows']) == len(changes['rows']) == 2 * len(paper.ENCODINGS)
    assert len(against['rows']) == 2 * (len(paper.ENCODINGS) - 1)
    for table in found['tables']:
        assert {len(row) for row in table['rows']} == {len(table['header'])}
    assert (answered / 'paper.png').stat().st_size > 5000
    assert found['settings']['seeds'] == [3] and found['settings']['steps'] == 2
    assert not any('{' in note for note in found['notes'])


def test_the_json_alone_gives_the_table(answered):
    found = json.loads((answered / 'paper.json').read_text())
    rows = {row['name']: row['runs'] for row in found['data']}
    accuracies = [one['metrics']['accuracy'] for one in rows[paper.PEG]]
    (shown,) = [row for row in found['tables'][4]['rows'] if row[0] == paper.PEG]
    assert shown[1].split(' ± ')[0] == f'{100 * np.mean(accuracies):.1f}'


def test_the_page_has_what_its_runs_say():
    findings = ROOT / 'experiments/position/findings'
    page = (findings / 'paper.md').read_text()
    saved = json.loads((findings / 'paper.json').read_text())
    data = saved['data']
    rows = {}
    for row in data:
        results = []
        for one in row['runs']:
            settings = ClassifierSettings(**one['settings'])
            rest = one['metrics'], one['losses'], one['failure'], 0.0
            results.append(Result(settings, *rest))
        rows[row['name']] = Trained(row['name'], paper.all_rows()[row['name']], results)
    sides = [int(name.split()[0]) for name in data[0]['runs'][0]['metrics'] if 'px' in name]
    of_sizes = "The paper's claims about larger pictures"
    of_sizes = paper.claims_table(rows, paper.OF_SIZES, of_sizes)
    of_training = "The paper's claims at the size of the training"
    of_training = paper.claims_table(rows, paper.OF_TRAINING_SIZE, of_training)
    for table, in_json in zip((of_sizes, of_training), saved['tables']):
        assert table.markdown() in page
        assert table.rows == in_json['rows']
    assert paper.sizes_table(rows, sides).markdown() in page
    assert paper.changes_table(rows, sides).markdown() in page
    assert paper.rows_table(rows).markdown() in page
    against = paper.against_learned_table(rows, sides)
    assert against.markdown() in page
    losses = {}
    for name in (paper.PEG, paper.LEARNED):
        metrics = [run.metrics for run in rows[name].runs]
        losses[name] = [100 * (one['48 px'] - one['28 px']) for one in metrics]
    test = ttest_rel(losses[paper.PEG], losses[paper.LEARNED])
    mean = np.mean(losses[paper.PEG]) - np.mean(losses[paper.LEARNED])
    half = test.confidence_interval().high - mean
    (shown,) = [row for row in against.rows if row[0] == paper.PEG]
    assert shown[against.header.index('48 px')].startswith(f'{mean:+.1f} ± {half:.1f} (')


def test_the_seeds_are_trained_one_after_the_other(photographs, tmp_path, monkeypatch):
    asked = []

    def fake(todo, *rest):
        asked.extend(todo)
        return [Result(one, {'accuracy': 0.5}, [1.0], '', 0.0) for one in todo]

    monkeypatch.setattr(laboratory, 'run_all', fake)
    monkeypatch.setattr(laboratory, 'tuned', lambda *rest: [1e-3])
    lab = Lab(PAPER_PRESETS['default'], tmp_path, seeds=2, data=str(photographs))
    paper.train_rows(lab)
    count = len(paper.all_rows())
    assert [one.seed for one in asked] == [0] * count + [1] * count
    resized = [bool(one.sizes) for one in asked[:count]]
    assert resized == [True] * 2 * len(paper.ENCODINGS) + [False] * len(paper.ABLATIONS)


def test_the_rate_is_that_of_the_learned_table(answered, photographs):
    tuning = [json.loads(path.read_text()) for path in (answered / 'runs').glob('*.json')]
    tuning = [one['settings'] for one in tuning if one['settings']['split'] == 'tuning']
    assert {one['position'] for one in tuning} == {'learned'}
    assert sorted(one['lr'] for one in tuning) == list(PAPER_PRESETS['smoke'].rates)
    assert {one['seed'] for one in tuning} == {3 + runs.TUNING_SEEDS}


def test_the_data_must_be_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tool.main(['paper', '--data', 'nowhere']) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert 'in nowhere; `apt-get download' in error
    assert not list(tmp_path.iterdir())
