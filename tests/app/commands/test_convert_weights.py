import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from foreign import TINY, classifier_of_mmpretrain, of_mmdet, of_mmseg, of_timm
from mutations import BAD, NAMES
from safetensors.torch import load_file
from support import load_tool, run

from cpvt_pyramid import ARCHS, CPVT, CPVTPyramid, DenseCPVT
from cpvt_pyramid.checkpoints.convert import convert_checkpoint
from cpvt_pyramid.checkpoints.formats import FORMATS

tool = load_tool('convert_weights')
NANO = of_timm('pcpvt_nano').state_dict()  # of an architecture that the tool knows


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save(tensors: dict, name: str = 'a.pth') -> str:
    torch.save(tensors, name)
    return name


def read(path: Path) -> dict:
    return load_file(path) if path.suffix == '.safetensors' else torch.load(path)


def convert(*arguments: object, **options: object) -> Path:
    return convert_checkpoint(*arguments, **options)[0]


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name


def deit(_arch: str) -> torch.nn.Module:
    return timm.create_model('vit_tiny_patch16_224', num_classes=5)


# For each format, a model of that package, which loads converted weights strictly
MODELS = {'timm': of_timm, 'mmseg': of_mmseg, 'mmpretrain': classifier_of_mmpretrain}


@pytest.mark.parametrize('first, second', itertools.permutations(MODELS, 2))
def test_there_and_back(first, second):
    theirs = MODELS[first]('pcpvt_nano').state_dict()
    if first == 'timm':  # of a detector, the backbone
        detector = {f'backbone.{k}': v for k, v in theirs.items()} | {'neck.weight': torch.ones(2)}
        there = convert(save({'state_dict': detector, 'meta': {'epoch': 1}}), 'timm')
        assert_same(read(there), theirs)
    there = convert(save(theirs), second, 'there')
    assert_same(read(convert(there, first, 'back')), theirs)

    if second == 'mmseg' or first == 'mmseg':  # no classifier
        there = convert('a.pth', second, 'there', backbone_only=True)
    model = MODELS[second]('pcpvt_nano')
    missing, unknown = model.load_state_dict(read(there), strict=False)
    assert not unknown
    assert all(re.match(r'(norm|head|backbone.norm_after)', name) for name in missing)
    assert not missing or first == 'mmseg' or second == 'mmseg'


# The rows whose places small ones take.
ROWS = dict(pcpvt='pcpvt_small', svt='svt_small', pvt='pvt_small', pvt_v2='pvt_v2_b1', mit='mit_b1')


@pytest.mark.parametrize(
    ('make', 'arch', 'to', 'back', 'key', 'safetensors'),
    [
        (of_mmseg, 'svt', 'mmpretrain', 'mmseg', 'backbone.norm_after_stage0.bias', False),
        (of_mmdet, 'pvt', 'official', 'mmdet', 'pos_embed4', True),
        (of_timm, 'pcpvt', 'mmseg', 'timm', 'layers.0.0.norm1.weight', True),
        (deit, '', 'mmpretrain_vit', 'timm', 'backbone.layers.0.ln1.weight', False),
        (of_timm, 'pvt_v2', 'mm_pvt_v2', 'timm', 'layers.3.1.0.attn.attn.in_proj_weight', False),
        (of_mmseg, 'mit', 'transformers', 'mm_pvt_v2', 'segformer.encoder.layer_norm.3.bias', True),
        (of_mmseg, 'mit', 'official', 'mm_pvt_v2', 'block4.0.mlp.dwconv.dwconv.bias', False),
    ],
)
def test_other_models(make, arch, to, back, key, safetensors, monkeypatch):
    if arch:
        monkeypatch.setitem(ARCHS, ROWS[arch], TINY[arch])
    theirs = make(arch)
    theirs = (theirs.bfloat16() if make == of_timm else theirs).state_dict()
    there = convert(save(theirs), to, safetensors=safetensors)
    assert key in read(there)
    assert_same(read(convert(there, back)), theirs)
    convert('a.pth', to, backbone_only=True)


OURS = {
    'columnar, bands': lambda: CPVT('cpvt_tiny', in_channels=4, num_classes=3),
    'columnar, PEGs everywhere': lambda: DenseCPVT('cpvt_tiny', peg=dict(after='all')),
    'columnar, PEGs of queries': lambda: CPVT('cpvt_tiny', peg=dict(after=-1, qk_only=True)),
    'columnar, relative': lambda: CPVT('cpvt_tiny', position='relative', class_token=False),
    'columnar, sincos': lambda: CPVT('cpvt_tiny', position='sincos'),
    'columnar, none': lambda: DenseCPVT('cpvt_tiny', position='none', out_indices=(2,)),
    'pyramid, rope': lambda: CPVTPyramid('pcpvt_nano', position='rope', in_channels=5),
    'pyramid, sincos': lambda: CPVTPyramid('pcpvt_nano', position='sincos'),
}


@pytest.mark.parametrize('make', OURS.values(), ids=OURS)
def test_our_models_of_other_bands_and_positions(make):
    ours = make().state_dict()
    assert_same(read(convert(save(ours), 'ours')), ours)
    missing = dict(ours)
    del missing[next(name for name in ours if 'blocks.' in name and 'norm2' in name)]
    with pytest.raises(ValueError, match='damaged: it lacks blocks'):
        convert(save(missing), 'ours')


@pytest.mark.parametrize('name', ['blocks.0.0.norm1.weight', 'blocks.3.0.norm1.weight'])
def test_the_norm_of_the_first_block_of_a_stage_is_missed_like_others(name):
    with pytest.raises(ValueError, match=f'damaged: it lacks {name}'):
        convert(save({key: value for key, value in NANO.items() if key != name}), 'timm')


def test_names_by_content_and_never_overwrites(capsys):
    save(NANO)
    command = ['a.pth', '--to', 'mmseg', '--out-dir', 'out']
    assert tool.main(command) == 0
    (path,) = Path('out').iterdir()
    assert re.fullmatch(r'a_mmseg-[0-9a-f]{8}\.pth', path.name)
    assert capsys.readouterr().out == f'wrote {path}\n'
    before = path.stat().st_mtime_ns
    assert tool.main(command) == 0
    assert capsys.readouterr().out == f'{path} already exists with this content\n'
    assert path.stat().st_mtime_ns == before
    path.write_bytes(b'other')
    assert tool.main(command) == 2
    assert path.read_bytes() == b'other' and os.listdir('out') == [path.name]


def test_what_does_not_come_through_is_not_written(monkeypatch):
    from cpvt_pyramid.checkpoints import formats

    def loses_a_tensor(tensors: dict, key: str) -> dict:
        return dict(list(to_format(tensors, key).items())[:-1])

    def changes_one(tensors: dict, key: str) -> dict:
        name = 'pos_block.0.proj.0.bias'
        return to_format(tensors | {name: tensors[name] + 1}, key)

    to_format = formats.to_format
    save(NANO)
    for broken in (loses_a_tensor, changes_one):
        monkeypatch.setattr(formats, 'to_format', broken)
        with pytest.raises(ValueError, match='the conversion changes'):
            convert('a.pth', 'mmseg', 'out')
        assert not os.listdir('out')


@pytest.mark.parametrize(
    ('tensors', 'to', 'complaint'),
    [
        (None, 'mmseg', 'no checkpoint at a.pth'),
        ({'a': os.system}, 'mmseg', 'a.pth holds more than tensors: posix.system'),
        ({'a': torch.ones(2)}, 'mmseg', 'no known architecture has these tensors'),
        ({'student': NANO}, 'mmseg', 'a.pth has no tensors, but student. Load a part that holds'),
        (
            NANO | {'blocks.0.0.attn.q.weight': NANO['blocks.0.0.attn.q.weight'].double()},
            'mmseg',
            'blocks.0.0.attn.q.weight and blocks.0.0.attn.kv.weight are one tensor in this format '
            'and must have one dtype, got torch.float64 and torch.float32',
        ),
        (NANO, 'pvt', "the format 'pvt' has no place for pos_block.0.proj.0.weight"),
        (of_mmdet('pvt_tiny').state_dict(), 'timm', 'timm has no pvt_tiny'),
        (of_mmseg('mit_b0').state_dict(), 'timm', 'timm has no mit_b0'),
    ],
)
def test_mistakes(tensors, to, complaint, capsys):
    if tensors:
        save(tensors)
    assert tool.main(['a.pth', '--to', to, '--out-dir', 'out']) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f'cpvt convert-weights: {complaint}') and errors.count('\n') == 1
    assert not Path('out').exists() or not os.listdir('out')
    assert tool.main(['~nobody-at-all/c.pth', '--to', to]) == 2
    line = capsys.readouterr().err
    assert line == 'cpvt convert-weights: no checkpoint at ~nobody-at-all/c.pth\n'


@pytest.mark.parametrize('options', [[], ['--safetensors']], ids=['pth', 'safetensors'])
def test_a_full_disk_is_one_line(options):
    words = [sys.executable, '-m', 'cpvt_pyramid', 'convert-weights', 'cpvt://pcpvt_nano']
    words += ['--to', 'mmseg', '--out-dir', 'new', *options]
    done = run('bash', '-c', f'ulimit -f 100; exec {shlex.join(words)}')
    line = 'cpvt convert-weights: no space left on the disk; nothing was written\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, '', line)
    assert not Path('new').exists()


def test_help_is_quick():
    command = [
        sys.executable,
        '-X',
        'importtime',
        '-m',
        'cpvt_pyramid',
        'convert-weights',
        '--help',
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout.startswith('usage: cpvt convert-weights ')
    assert ' torch\n' not in ended.stderr
    assert all(key in ended.stdout for key in FORMATS)


SMALL = of_timm('pcpvt').state_dict()
DAMAGED = {
    f'{name}: {defect}': SMALL | {name: damage(SMALL[name])}
    for name in ('blocks.0.0.attn.q.weight', 'head.weight')
    for defect, damage in BAD.items()
}
DAMAGED |= {
    f'without {part}': {k: v for k, v in SMALL.items() if not k.startswith(part)}
    for part in ('pos_block.2.', 'blocks.0.1.norm1.', 'norm.', 'norm.bias')
    + ('patch_embeds.1.proj.weight', 'patch_embeds.3', 'head.bias')
}
DAMAGED['no classes'] = SMALL | {k: SMALL[k][:0] for k in ('head.weight', 'head.bias')}


def test_damage_and_strange_names_give_one_line_at_most(capsys, monkeypatch):
    monkeypatch.setitem(ARCHS, 'pcpvt_small', TINY['pcpvt'])
    strange = {repr(name): {**SMALL, name: torch.ones(3)} for name in NAMES}
    for name, tensors in (DAMAGED | strange).items():
        status = tool.main([save(tensors), '--to', 'mmseg', '--out-dir', 'out'])
        errors = capsys.readouterr().err
        assert status in (0, 2) and errors.count('\n') == (1 if status else 0), name
        if name in DAMAGED:
            assert status == 2 and not list(Path().glob('out/*')), name
            assert len(errors) < 1000 and 'no known architecture' not in errors, name
        for file in Path().glob('out/*'):
            file.unlink()


def test_help_lists_the_formats(capsys):
    """In the text, with the models that they are of, and not in the usage."""
    with pytest.raises(SystemExit):
        tool.main(['--help'])
    usage, _, text = capsys.readouterr().out.partition('\n\n')
    assert '--to NAME' in usage and 'mmpretrain' not in usage
    named = set(re.findall(r'\w+', text.partition('Writes ')[0]))
    assert {'official', 'timm', *FORMATS} <= named
