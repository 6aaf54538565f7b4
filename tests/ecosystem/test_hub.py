"""Models on the hub: uploaded to and downloaded from a server that speaks its protocol."""

import json
import re

import pytest
import skimage.data
import timm
import torch
import yaml
from hub_server import serve_hub
from safetensors.torch import load_file, save_file
from support import assert_loaded
from timm.models import push_to_hf_hub

from cpvt_pyramid import ARCHS, ColumnarArch, CPVTPyramid, PEGConfig, load_weights, timm_models
from cpvt_pyramid.hub import KINDS, HubModel

COLUMN = dict(dim=16, heads=2, depth=2)
SMALL = dict(backbone='pcpvt_nano', num_classes=4, out_channels=32, min_size=64, max_size=90)
MODELS = {
    'CPVTPyramid': dict(
        arch=ARCHS['pcpvt_nano']._replace(depths=(1, 1, 2, 1))._asdict(),
        out_indices=(1, 2),
        peg=dict(after=(0,), kernel_size=5),
    ),
    'DenseCPVT': dict(arch=COLUMN, out_channels=8),
    'CPVT': dict(arch=COLUMN, num_classes=4, position='learned'),
    'retinanet': dict(
        SMALL,
        backbone=dict(arch='pcpvt_nano', drop_path_rate=0.2),
        head_convs=1,
        min_size=(64, 80),
        score_thresh=0.0,
    ),
    'fcos': dict(SMALL, out_channels=64, extra_levels=1, score_thresh=0.0),
    'faster_rcnn': dict(SMALL, box_score_thresh=0.0, box_detections_per_img=5),
    'mask_rcnn': dict(SMALL, box_score_thresh=0.0, box_detections_per_img=5),
}
FILES = {'README.md', 'config.json', 'model.safetensors'}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve_hub(monkeypatch, tmp_path / 'cache') as server:
        yield server


def image() -> torch.Tensor:
    return torch.tensor(skimage.data.chelsea()[:70, 100:190]).permute(2, 0, 1) / 255


@torch.no_grad()
def outputs(model: HubModel, kind: str) -> list[torch.Tensor]:
    is_detector = KINDS[kind] == 'tasks.detectors'
    out = model.eval()([image()] if is_detector else image()[None])
    return list(out[0].values()) if is_detector else list(out)


@pytest.mark.parametrize('kind', KINDS)
def test_every_model_survives(kind, tmp_path):
    model = HubModel(kind, **MODELS[kind])
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    again = HubModel.from_pretrained(tmp_path)
    assert not again.training
    found, expected = outputs(again, kind), outputs(model, kind)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(x.numel() for x in found)


ROW = ARCHS['pcpvt_nano']._replace(depths=(1, 1, 1, 1))


@pytest.mark.parametrize(
    'kind, options',
    [
        ('CPVTPyramid', dict(arch=ROW, peg=PEGConfig(kernel_size=5), out_indices=(0, 2))),
        ('DenseCPVT', dict(arch=ColumnarArch(**COLUMN), out_channels=8)),
        ('CPVT', dict(arch=ColumnarArch(**COLUMN), num_classes=4)),
        ('retinanet', dict(SMALL, backbone=dict(arch=ROW, peg=PEGConfig(layers=2)))),
    ],
)
def test_rows_of_our_tables_are_options(kind, options, tmp_path):
    model = HubModel(kind, **options)
    model.save_pretrained(tmp_path)
    again = HubModel.from_pretrained(tmp_path)
    assert_loaded(again, model.state_dict())
    assert [p.shape for p in again.parameters()] == [p.shape for p in model.parameters()]
    if kind == 'CPVTPyramid':
        assert again.model.arch == model.model.arch and again.model.channels == (32, 128)


def test_a_detector_on_the_hub(hub):
    classes = ['zero', 'one', 'two', 'three']
    model = HubModel('retinanet', classes=classes, **MODELS['retinanet'])
    torch.nn.init.normal_(model.model.head.classification_head.cls_logits.weight, std=1)
    card = dict(repo_id='me/digits', description='Trained on digits.')
    url = model.push_to_hub('digits', token='secret', model_card_kwargs=card)
    assert url.startswith(f'{hub.url}/me/digits/')
    assert set(hub.repos['me/digits']) == FILES

    again = HubModel.from_pretrained('me/digits')
    assert again.classes == classes
    assert all(map(torch.equal, outputs(again, 'retinanet'), outputs(model, 'retinanet')))
    again.push_to_hub('me/digits', token='secret')  # to a repository that exists
    text = hub.repos['me/digits']['README.md'].decode()
    assert yaml.safe_load(text.split('---')[1])['library_name'] == 'cpvt_pyramid'
    hub.shutdown()
    offline = HubModel.from_pretrained('me/digits', local_files_only=True)
    assert all(map(torch.equal, outputs(offline, 'retinanet'), outputs(model, 'retinanet')))


def test_the_card_says_how_to_load_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = HubModel('CPVTPyramid', arch='pcpvt_nano')
    model.save_pretrained('nano', model_card_kwargs=dict(repo_id='nano', description='Ours.'))
    text = (tmp_path / 'nano/README.md').read_text()
    assert '# nano\n\nOurs.\n' in text
    (code,) = re.findall(r'```python\n(.*?)```', text, re.S)
    exec(code, {})
    model.save_pretrained('other')
    assert 'licence are not stated' in (tmp_path / 'other/README.md').read_text()


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    HubModel('CPVTPyramid', **MODELS['CPVTPyramid']).save_pretrained(tmp_path)
    path = tmp_path / 'model.safetensors'
    whole = load_file(path)
    (name, *_) = whole
    for tensors, message in (
        ({k: v for k, v in whole.items() if k != name}, 'Missing key'),
        (whole | {'model.more': torch.ones(1)}, 'Unexpected key'),
        (whole | {name: torch.ones(3)}, 'size mismatch'),
    ):
        save_file(tensors, path)
        with pytest.raises(RuntimeError, match=message):
            HubModel.from_pretrained(tmp_path)


def test_a_config_names_models_of_this_package_only(tmp_path):
    HubModel('CPVTPyramid', arch='pcpvt_nano').save_pretrained(tmp_path)
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    for changed, message in (
        (dict(kind='os.system'), "kind must be one of CPVTPyramid, .*, got 'os.system'"),
        (dict(arch='pcpvt_big'), 'unknown arch .pcpvt_big.'),
    ):
        path.write_text(json.dumps(config | changed))
        with pytest.raises(ValueError, match=message):
            HubModel.from_pretrained(tmp_path)


def test_options_must_be_json():
    with pytest.raises(TypeError, match='CPVTPyramid is not JSON serializable'):
        HubModel('retinanet', backbone=CPVTPyramid('pcpvt_nano'), num_classes=4)


@pytest.mark.parametrize(('name', 'options'), [('pcpvt_nano', {}), ('cpvt_tiny', COLUMN)])
def test_timms_own_functions_take_our_models(hub, name, options):
    assert timm_models  # which registers them
    options = dict(arch=options) if options else {}
    model = timm.create_model(name, num_classes=3, in_chans=4, **options).eval()
    push_to_hf_hub(model, 'me/theirs', token='secret', safe_serialization=True)
    again = timm.create_model('hf-hub:me/theirs', pretrained=True).eval()
    x = torch.rand(1, 4, 70, 90)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    if name == 'pcpvt_nano':  # its weights serve a backbone
        backbone = CPVTPyramid('pcpvt_nano', in_channels=4)
        assert not load_weights(backbone, 'hf://me/theirs').kept
