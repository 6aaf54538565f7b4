"""speed.py, its measurements and its tables, with tiny models."""

import copy
import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from reference import same_maps

from benchmarks import measuring, model_table, parts, speed_tables
from benchmarks import speed as tool
from benchmarks.measuring import Case, Runner, Runners, Variant
from benchmarks.timing import Time
from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.app.tooling.sizes import Size

OURS_AND_OTHERS = ['timm', 'plain', 'accelerated', 'openvino']


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block in each stage, and small products."""
    for arch in ('pcpvt_nano', 'svt_small', 'pvt_v2_b0', 'mit_b0', 'pvt_tiny'):
        shallow = tool.ARCHS[arch]._replace(depths=(1, 1, 1, 1))
        monkeypatch.setitem(tool.ARCHS, arch, shallow)
    monkeypatch.setattr(measuring, 'PRODUCTS', ((64, 16), (32, 32)))


def rows_of(path: Path, **options) -> list[dict]:
    settings = dict(
        archs=['pcpvt_nano'], sizes=[Size(32, 64)], rounds=1, threads=[1], no_memory=True
    )
    file = path / 'speed.json'
    tool.speed(json=str(file), **settings | options)
    return json.loads(file.read_text())['rows']


def test_inference(tmp_path, capsys):
    rows = rows_of(tmp_path, threads=[1, 2], rounds=2)
    results = json.loads((tmp_path / 'speed.json').read_text())
    assert {'machine', 'commit', 'timm', 'openvino', 'by', 'rows'} == set(results)
    in_float32 = [('float32', n, model) for n in (1, 2) for model in OURS_AND_OTHERS]
    in_bfloat16 = [('bfloat16', n, model) for n in (1, 2) for model in OURS_AND_OTHERS]
    autocast = [('autocast', n, model) for n in (1, 2) for model in OURS_AND_OTHERS[:-1]]
    assert [Variant.of(row) for row in rows] == in_float32 + in_bfloat16 + autocast
    for row in rows:
        assert len(row['clock_seconds']) == len(row['processor_seconds']) == 2
        assert 0 < speed_tables.share(row, 'clock') and 0 < speed_tables.share(row, 'processor')
        assert row['difference'] <= measuring.TOLERANCES[row['dtype']]
    assert capsys.readouterr().out.count(' x OpenVINO ') == 1


def test_what_openvino_converts_has_the_same_maps(tmp_path):
    models = ['openvino', 'converted']
    rows = rows_of(tmp_path, models=models, steps=['inference'], dtypes=['float32'])
    assert [row['model'] for row in rows] == models
    assert all(row['difference'] < 1e-4 and row['clock_seconds'] for row in rows)


def test_parts_of_acceleration(tmp_path):
    """Each left out in a process of its own; the maps are the same. The next test has all parts."""
    parts = ['products', 'kernels']
    # Of an architecture that the other processes know as it is here, with hundreds of tensors.
    options = dict(archs=['pcpvt_small'], models=['accelerated'], dtypes=['float32'])
    rows = rows_of(tmp_path, without=parts, **options)
    models = ['accelerated', *(f'without {part}' for part in parts)]
    assert [row['model'] for row in rows] == models
    for row in rows:
        assert row['difference'] <= measuring.TOLERANCES[row['dtype']] and row['clock_seconds']
    lines = speed_tables.lines_of(rows, 'clock')
    of_whole = speed_tables.HEAD.index('x whole')
    assert [bool(line[of_whole]) for line in lines] == [False, True, True]


def test_a_part_is_left_out():
    """What each of these models has of acceleration, and that its maps are the same."""
    plain = CPVTPyramid('svt_small').eval()
    image = torch.randn(1, 3, 64, 96)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for part, accelerate_without in parts.PARTS.items():
            patch.setattr(parts.kernels, 'library', parts.kernels.library)  # undone at the end
            parts.kernels.has_kernels.cache_clear()
            model = copy.deepcopy(plain)
            accelerate_without(model)
            with torch.no_grad():
                same_maps(model(image), plain(image))
            classes = {type(module) for module in model.modules()}
            found[part] = {
                'products' if parts.OneDNNLinear in classes and parts.FusedMLP in classes else '',
                'kernels' if parts.kernels.has_kernels(torch.float32) else '',
                'attention' if any(issubclass(c, parts.AttentionInParts) for c in classes) else '',
            }
            mock.patch.stopall()
    parts.kernels.has_kernels.cache_clear()
    here = {'products', 'attention'}
    here |= {'kernels'} if parts.kernels.has_kernels(torch.float32) else set()
    assert found == {part: (here - {part}) | {''} for part in here} | (
        {} if 'kernels' in here else {'kernels': here | {''}}
    )


@pytest.mark.parametrize('arch', ['svt_small', 'pvt_v2_b0', 'mit_b0', 'pvt_tiny'])
def test_every_library_has_the_same_maps_and_gradients(arch, tmp_path):
    """SVT's windows do not fill these maps."""
    models = ['timm', 'openmmlab', 'plain', 'accelerated', 'checkpointed']
    rows = rows_of(tmp_path, archs=[arch], models=models, steps=['training'], dtypes=['float32'])
    expected = models[1:] if arch == 'pvt_tiny' else models
    assert [row['model'] for row in rows] == expected
    assert all(row['difference'] < 1e-4 and row['clock_seconds'] for row in rows)


def test_training_in_bfloat16(tmp_path):
    rows = rows_of(tmp_path, steps=['training'], dtypes=['bfloat16', 'autocast'])
    assert [row['model'] for row in rows] == 2 * OURS_AND_OTHERS[:-1]
    for row in rows:
        assert row['difference'] < measuring.TOLERANCES[row['dtype']] and row['clock_seconds']
        assert ('norm_difference' in row) == (row['model'] == 'timm')


def test_layer_norms_are_judged_in_ours_alone(monkeypatch):
    """PyTorch's gradients of other libraries' are wrong; MMSegmentation names some as we do."""

    def results(runner: Runner) -> dict[str, torch.Tensor]:
        found = right_results(runner)
        name = 'gradient of patch_embeds.0.norm.bias'
        gradient = runners.references()[0][name] if name not in found else found[name]
        return {**found, name: 0.1 * gradient}

    case = Case('pcpvt_nano', 'training', 32, 64)
    runners = Runners(case)
    right_results = Runner.results
    references = runners.references()
    monkeypatch.setattr(Runners, 'references', lambda _: references)
    monkeypatch.setattr(Runner, 'results', results)
    variants = [Variant('bfloat16', 1, model) for model in ('timm', 'plain')]
    timms, ours = measuring.measure(case, variants, rounds=1, seconds=1, memory=False)
    assert timms['norm_difference'] > 0.5 and 'failed' not in timms
    assert ours['is_wrong'] and ours['difference'] > 0.5


def test_a_wrong_result_has_no_time(monkeypatch, tmp_path, capsys):
    def results(runner: Runner) -> dict[str, torch.Tensor]:
        found = right_results(runner)
        if runner.autocast:
            found['map 3'] = found['map 3'].clone()
            found['map 3'][..., -1] = math.nan
        return found

    right_results = Runner.results
    monkeypatch.setattr(Runner, 'results', results)
    options = '--archs pcpvt_nano --sizes 32 --models plain --threads 1 --rounds 1 --json'
    file = tmp_path / 'a.json'
    assert tool.main([*options.split(), str(file)]) == 2
    out, error = capsys.readouterr()
    assert 'pcpvt_nano, inference, 32x32, plain in autocast, 1 thread:' in error
    assert 'wrong: differs by inf' in out
    right, _, wrong = json.loads(file.read_text())['rows']
    assert 'clock_seconds' in right and 'clock_seconds' not in wrong


def test_operations_of_a_step():
    """The table of models counts the same, as multiply-additions."""
    *_, gflops, _, _, _, _, _ = model_table.pyramid_row('pvt_v2_b1')
    forward = measuring.operations(Case('pvt_v2_b1', 'inference', 224, 224))
    assert f'{forward / 2e9:.1f}' == gflops
    assert measuring.operations(Case('pvt_v2_b1', 'training', 224, 224)) == 3 * forward


def test_a_small_product_on_a_busy_machine_has_a_rate():
    """By which shares are divided."""
    products = measuring.Products(torch.float32, threads=1)
    products.times = {2 * 64 * 16 * 64: [Time(clock=0.01, processor=0.01)]}
    assert min(products.gflops().values()) > 0


def test_models_differ_where_their_weights_do():
    case = Case('pcpvt_nano', 'training', 64, 64)
    variant = Variant('float32', 1, 'timm')
    runners = Runners(case)
    (reference,) = runners.references()
    same = runners.runner(variant)
    assert measuring.difference(same.results(), reference) < 1e-4
    with torch.no_grad():
        next(same.model.parameters()).mul_(1.1)
    assert measuring.difference(same.results(), reference) > 1e-3


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith('| ')]
    return [line[2:-2].split(' | ') for line in lines]


def test_tables():
    """Of models whose times and memory are a number times those of the accelerated one."""
    numbers = dict(timm=4, openmmlab=3, plain=2, accelerated=1, openvino=5)
    rows = []
    for step in measuring.STEPS:
        case = Case('svt_small', step, 512, 512)
        models = [*numbers, 'without attention'] if step == 'inference' else list(numbers)
        for variant in measuring.variants_of(case, models, measuring.DTYPES, [1, 2]):
            number = numbers.get(variant.model, 1.5)
            row = {**case._asdict(), **variant._asdict(), 'difference': 0.0}
            row['clock_seconds'] = [
                0.008 * number / variant.threads,
                0.01 * number / variant.threads,
                9,
            ]
            row['processor_seconds'] = [0.016 * number, 0.008 * number]  # of all threads
            row['peak_mib'] = 10 * number
            row['gflops'] = 1.0
            row['product_gflops'] = {'clock': 200.0 * variant.threads, 'processor': 250.0}
            rows.append(row)
    by_clock = speed_tables.Measured(rows, 'clock', 'Zen', 'Zen, commit 1')

    assert cells(speed_tables.readme_section([by_clock])) == [
        ['one image of 512 x 512, one CPU thread', 'Twins-SVT-S'],
        ['---', '---'],
        ['inference, float32', '10 ms'],
        ['in timm', 'x 4.00'],
        ['in OpenMMLab', 'x 3.00'],
        ['in OpenVINO', 'x 5.00'],
        ['inference, bfloat16', '10 ms'],
        ['in timm', 'x 4.00'],
        ['in OpenMMLab', 'x 3.00'],
        ['in OpenVINO', 'x 5.00'],
        ['training step, float32', '10 ms'],
        ['in timm', 'x 4.00'],
        ['in OpenMMLab', 'x 3.00'],
        ['peak memory of the step', '10 MiB'],
        ['in timm', 'x 4.00'],
        ['in OpenMMLab', 'x 3.00'],
    ]
    found = cells(speed_tables.page_section([by_clock]))
    size = ['Zen', 'Twins-SVT-S', '512 x 512']
    of_one = ['40', '30', '20', '10', '50', '50%', '40', '10', '10', '50', '50%']
    of_two = ['20', '15', '10', '5', '25', '50%', '20', '5', '5', '25', '50%']
    assert found[2:4] == [[*size, '1', *of_one], [*size, '2', *of_two]]
    of_one = ['40', '30', '20', '10', '50%', '10', '10', '40', '30', '20', '10']
    assert found[6] == [*size, '1', *of_one]

    # Without a part, in half of the time that is longer; "all" is the plain model.
    of_parts = ['', '', '1.50', '2.00']
    assert found[10] == [*size, '1', 'inference', *of_parts, *of_parts]

    of_inference = [row for row in rows if row['step'] == 'inference']
    lines = speed_tables.lines_of(of_inference, 'processor')
    found = {tuple(line[:3]): line[3:] for line in lines}
    ratios = ['4.00', '5.00', '', '', '', '50%']
    assert found['float32', '1', 'accelerated'] == ['10.0', '8.0', *ratios, '10', '0e+00', '', '']
    ratios = ['4.00', '5.00', '', '1.00', '2.00', '100%']  # whose limit does not rise here
    assert found['autocast', '2', 'accelerated'] == ['5.0', '4.0', *ratios, '10', '0e+00', '', '']


def test_tables_of_several_processors():
    """Cells of the README are from the least to the largest; the page names the processors."""

    def of_processor(name, milliseconds):
        rows = []
        for model, factor in (('timm', 3), ('accelerated', 1)):
            row = {**Case('mit_b2', 'inference', 512, 512)._asdict(), 'gflops': 1.0}
            row |= Variant('float32', 1, model)._asdict()
            row['clock_seconds'] = [factor * milliseconds / 1e3 + (model == 'timm') / 1e3]
            row['product_gflops'] = {'clock': 200.0}
            rows.append(row)
        return speed_tables.Measured(rows, 'clock', name, f'{name}, commit 1')

    measured = [of_processor('Zen', 10), of_processor('Rapids', 5)]
    section = speed_tables.readme_section(measured)
    assert "with timm's models takes 3.1 to 3.2 times as long" in section
    table = cells(section)
    assert table[2:4] == [['inference, float32', '5 to 10 ms'], ['in timm', 'x 3.10 to 3.20']]
    page = speed_tables.page_section(measured)
    assert [line[:6] for line in cells(page)[2:]] == [
        ['Zen', 'MiT-B2', '512 x 512', '1', '31', ''],
        ['Rapids', 'MiT-B2', '512 x 512', '1', '16', ''],
    ]
    assert '- Zen, commit 1\n- Rapids, commit 1\n' in page


def test_one_command_records_a_processor(monkeypatch, tmp_path):
    """Its times and the tables; other processors' times stay."""
    (tmp_path / 'zen.json').write_bytes(
        (speed_tables.MEASURED / 'amd-epyc-zen-5.json').read_bytes()
    )
    pages = []
    for name in ('README', 'PAGE'):
        page = tmp_path / f'{name}.md'
        page.write_text('<!-- speed: a -->\n<!-- end of speed -->')
        monkeypatch.setattr(speed_tables, name, page)
        pages.append(page)
    monkeypatch.setattr(speed_tables, 'MEASURED', tmp_path)
    machine = dict(processor='A (B), c', cores=2, torch='2')
    monkeypatch.setattr(tool, 'machine', lambda device: machine)
    options = dict(rounds=1, threads=[1], dtypes=['float32'], models=['plain', 'accelerated'])
    tool.speed(archs=['pcpvt_nano'], sizes=[Size(64, 64)], batches=[1, 3], record=True, **options)
    found = json.loads((tmp_path / 'a-b-c.json').read_text())
    models = [(row['batch'], row['model']) for row in found['rows']]
    assert models == [(1, 'plain'), (1, 'accelerated'), (3, 'plain'), (3, 'accelerated')]
    for page in pages:
        assert 'AMD EPYC (Zen 5), 2 cores' in page.read_text()
        assert 'A (B), c, 2 cores' in page.read_text()


def test_a_second_record_adds_to_the_first(monkeypatch, tmp_path):
    """Of the same commit; rows that are measured again are replaced."""
    for name in ('README', 'PAGE'):
        page = tmp_path / f'{name}.md'
        page.write_text('<!-- speed: a -->\n<!-- end of speed -->')
        monkeypatch.setattr(speed_tables, name, page)
    monkeypatch.setattr(speed_tables, 'MEASURED', tmp_path)
    machine = dict(processor='A', cores=2, torch='2')
    monkeypatch.setattr(tool, 'machine', lambda device: machine)
    options = dict(rounds=1, threads=[1], dtypes=['float32'], archs=['pcpvt_nano'], record=True)

    def record(batches, models, commit):
        about = dict(commit=commit, timm='1', openvino='1')
        monkeypatch.setattr(tool, 'version', lambda: about)
        tool.speed(sizes=[Size(64, 64)], batches=batches, models=models, **options)
        rows = json.loads((tmp_path / 'a.json').read_text())['rows']
        return [(row['batch'], row['model']) for row in rows]

    assert record([1], ['plain', 'accelerated'], 'a') == [(1, 'plain'), (1, 'accelerated')]
    found = record([1, 2], ['plain'], 'a')
    assert found == [(1, 'accelerated'), (1, 'plain'), (2, 'plain')]
    assert record([1], ['plain'], 'b') == [(1, 'plain')]


def test_memory_of_a_process():
    """A step takes more memory than its image, and less than everything."""
    case = Case('pcpvt_nano', 'training', 128, 128)
    variant = Variant('float32', 1, 'accelerated')
    image = 3 * 128 * 128 * 4 / measuring.MIB
    assert image < measuring.call_in_process(measuring.measure_peak, case, variant) < 1000


def test_failures_are_rows_and_an_interrupt_keeps_finished_results(monkeypatch, capsys, tmp_path):
    def build(runners, name):
        if runners.case.height == 64:
            raise KeyboardInterrupt
        if name == 'timm':
            raise MemoryError('too large')
        return right_build(runners, name)

    right_build = Runners.build
    monkeypatch.setattr(Runners, 'build', build)
    file = tmp_path / 'a.json'
    options = '--archs pcpvt_nano --models timm plain --sizes 32 64 --rounds 1 --dtypes float32'
    assert tool.main([*options.split(), '--threads', '1', '--json', str(file)]) == 130
    out, error = capsys.readouterr()
    assert 'too large' in out and 'interrupted' in error
    timm, plain = json.loads(file.read_text())['rows']
    assert 'clock_seconds' in plain
    assert timm['failed'] == 'too large' and 'clock_seconds' not in timm


@pytest.mark.parametrize(
    ('arguments', 'complaint'),
    [
        ('--archs pcpvt_tiny', "unknown arch 'pcpvt_tiny'; one of pcpvt_nano"),
        ('--sizes 31', 'multiples of 32, got 31x31'),
        ('--sizes 64x100', 'multiples of 32, got 64x100'),
        ('--threads 0', '--threads must be at least 1, got 0'),
        ('--json there.json', 'there.json already exists'),
        ('--json nowhere/a.json', 'no such directory'),
    ],
)
def test_mistakes(arguments, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('there.json').touch()
    monkeypatch.setattr(tool, 'measure', lambda *_: pytest.fail('begun'))
    assert tool.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith('speed: ') and complaint in error and error.count('\n') == 1
