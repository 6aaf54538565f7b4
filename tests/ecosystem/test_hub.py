"""Models on the hub: uploaded to and downloaded from a server that speaks its protocol."""

import re
import sys

import pytest
import skimage.data
import timm
import torch
import yaml
from hub_server import serve_hub
from huggingface_hub.errors import RepositoryNotFoundError
from PIL import Image
from safetensors.torch import load, load_file, save, save_file
from support import ROOT
from timm.models import push_to_hf_hub

from cpvt_pyramid import ARCHS, CPVTPyramid, load_weights
from cpvt_pyramid.hub import KINDS, HubModel
from cpvt_pyramid.torchvision_models import retinanet

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
    'classifier': dict(model_name='pcpvt_nano', num_classes=4, drop_path_rate=0.1),
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
    'semantic_fpn': dict(backbone='pcpvt_nano', num_classes=4, out_channels=32, head_channels=32),
}
FILES = {'README.md', 'config.json', 'model.safetensors'}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve_hub(monkeypatch, tmp_path / 'cache') as server:
        yield server


def image() -> torch.Tensor:
    return torch.tensor(skimage.data.chelsea()[:70, 100:190]).permute(2, 0, 1) / 255


@torch.no_grad()
def outputs(model: HubModel) -> list[torch.Tensor]:
    detector = KINDS[model.kind][1] == 'object-detection'
    out = model.eval()([image()] if detector else image()[None])
    out = out[0] if detector else out
    return list(out.values()) if isinstance(out, dict) else list(out)


@pytest.mark.parametrize('kind', KINDS)
def test_every_model_survives(kind, tmp_path):
    model = HubModel(kind, **MODELS[kind])
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    again = HubModel.from_pretrained(tmp_path)
    assert not again.training and again.options == model.options
    found, expected = outputs(again), outputs(model)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(x.numel() for x in found)


def test_a_detector_on_the_hub(hub):
    classes = ['zero', 'one', 'two', 'three']
    model = HubModel('retinanet', classes=classes, **MODELS['retinanet'])
    torch.nn.init.normal_(model.model.head.classification_head.cls_logits.weight, std=1)
    url = model.push_to_hub('digits', token='secret')
    assert url.startswith(f'{hub.url}/me/digits/')
    assert set(hub.repos['me/digits']) == FILES

    again = HubModel.from_pretrained('me/digits')
    assert again.classes == classes
    assert all(map(torch.equal, outputs(again), outputs(model)))
    again.push_to_hub('me/digits', token='secret')  # to a repository that exists
    with pytest.raises(RepositoryNotFoundError, match='Repository Not Found'):
        HubModel.from_pretrained('me/nothing')
    hub.shutdown()
    offline = HubModel.from_pretrained('me/digits', local_files_only=True)
    assert all(map(torch.equal, outputs(offline), outputs(model)))


def test_the_card_is_filled_in_and_its_code_works(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(skimage.data.chelsea()[:90, 100:220]).save('image.jpg')
    card = dict(license='cc0-1.0', data='Digits, 2026', metrics={'box AP50': 0.74, 'box AP': 0.55})
    classes = [f'class {i}' for i in range(4)]
    for kind in ('retinanet', 'semantic_fpn', 'classifier', 'CPVTPyramid'):
        model = HubModel(kind, classes=classes, **MODELS[kind])
        model.push_to_hub(f'me/{kind}', token='secret', model_card_kwargs=card)
        text = hub.repos[f'me/{kind}']['README.md'].decode()
        (code,) = re.findall(r'```python\n(.*?)```', text, re.S)
        assert f"from_pretrained('me/{kind}')" in code
        # No index has the package.
        assert re.search(
            r"In a checkout of cpvt_pyramid:\n\n```bash\npip install '\.\[hub,\w+\]'\n", text
        )
        exec(code, {})
        data = yaml.safe_load(text.split('---')[1])
        assert data['license'] == 'cc0-1.0' and data['pipeline_tag'] == KINDS[kind][1]
        (result,) = data['model-index'][0]['results']
        assert result['dataset']['name'] == 'Digits, 2026'
        assert result['metrics'] == [
            dict(type=name, value=value) for name, value in card['metrics'].items()
        ]
        assert '| box AP50 | 0.74 |' in text and 'class 0, class 1' in text
        assert 'Not stated' not in text

    HubModel('CPVTPyramid', arch='pcpvt_nano').save_pretrained('.')  # claims nothing by itself
    text = (tmp_path / 'README.md').read_text()
    assert text.count('Not stated') == 3 and 'license:' not in text and 'model-index' not in text
    exec(re.findall(r'```python\n(.*?)```', text, re.S)[0], {})


def test_timm_reads_our_classifiers_and_we_say_so_of_theirs(hub):
    ours = HubModel('classifier', classes=['a', 'b', 'c', 'd'], **MODELS['classifier'])
    ours.push_to_hub('me/ours', token='secret')
    loaded = timm.create_model('hf-hub:me/ours', pretrained=True).eval()
    assert loaded.pretrained_cfg['label_names'] == ['a', 'b', 'c', 'd']
    assert torch.equal(loaded(image()[None]), ours.eval()(image()[None]))
    finetuned = timm.create_model('hf_hub:me/ours', pretrained=True, num_classes=7).eval()
    assert finetuned(image()[None]).shape == (1, 7)
    with torch.no_grad():
        maps = timm.create_model('hf_hub:me/ours', pretrained=True, features_only=True).eval()
        expected = ours.model.forward_intermediates(image()[None], intermediates_only=True)
        assert all(map(torch.equal, maps(image()[None]), expected))


@pytest.mark.parametrize(('name', 'options'), [('pcpvt_nano', {}), ('cpvt_tiny', COLUMN)])
def test_timms_own_functions_take_our_models(hub, name, options):
    options = dict(arch=options) if options else {}
    model = timm.create_model(name, num_classes=3, in_chans=4, **options).eval()
    push_to_hf_hub(model, 'me/theirs', token='secret', safe_serialization=True)
    again = timm.create_model('hf-hub:me/theirs', pretrained=True).eval()
    x = torch.rand(1, 4, 70, 90)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    with pytest.raises(ValueError, match=r'config.json must hold .* with timm.create_model'):
        HubModel.from_pretrained('me/theirs')
    if name == 'pcpvt_nano':  # its weights serve a backbone
        backbone = CPVTPyramid('pcpvt_nano', in_channels=4)
        assert not load_weights(backbone, 'hf://me/theirs/model.safetensors').kept


def test_damaged_and_missing_files_give_one_clear_error(tmp_path, monkeypatch):
    HubModel('retinanet', **MODELS['retinanet']).save_pretrained(tmp_path)
    path = tmp_path / 'config.json'
    config = path.read_text()
    for text, message in (
        ('[]', "must hold the 'kind' and the 'options'"),
        (config[: len(config) // 2], "must hold the 'kind' and the 'options'"),
        (config.replace('"retinanet"', '["x"]'), 'kind must be one of CPVTPyramid'),
        (config.replace('retinanet', 'os.system'), 'kind must be one of CPVTPyramid'),
        (config.replace('pcpvt_nano', 'pcpvt_big'), 'unknown arch .pcpvt_big.'),
        (config.replace('pcpvt_nano', 'svt_small'), 'does not fit config.json: it lacks'),
        (config.replace('"classes": null', '"classes": "abcd"'), 'classes must be'),
        (config.replace('head_convs', 'heads'), 'RetinaNet has no option heads'),
        (config.replace('"num_classes": 4', '"num_classes": 3'), 'it has other shapes'),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            HubModel.from_pretrained(tmp_path)
        assert str(tmp_path) in str(error.value)
    path.write_text(config.replace('"classes"', '"clases"'))
    with pytest.warns(UserWarning, match=r'config.json: nothing reads clases'):
        HubModel.from_pretrained(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ModuleNotFoundError):
        patch.setitem(sys.modules, 'cpvt_pyramid.torchvision_models', None)
        HubModel.from_pretrained(tmp_path)
    path.write_text(config)
    path = tmp_path / 'model.safetensors'
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match='is not a complete checkpoint'):
        HubModel.from_pretrained(tmp_path)
    save_file(load(whole) | {'x': torch.ones(1)}, path)
    with pytest.raises(ValueError, match='has more than the model: x'):
        HubModel.from_pretrained(tmp_path)
    path.rename(tmp_path / 'pytorch_model.bin')  # which is never read
    with pytest.raises(FileNotFoundError, match='no checkpoint at .*model.safetensors'):
        HubModel.from_pretrained(tmp_path)
    (tmp_path / 'config.json').unlink()
    with pytest.raises(FileNotFoundError, match='config.json'):
        HubModel.from_pretrained(tmp_path)


def test_options_that_are_refused():
    with pytest.raises(TypeError, match='score_thresh of RetinaNet must be a number'):
        HubModel('retinanet', **MODELS['retinanet'] | dict(score_thresh='0.5'))
    with pytest.raises(ValueError, match='classes must be a list of names'):
        HubModel('semantic_fpn', classes='abcd', **MODELS['semantic_fpn'])
    with pytest.raises(TypeError, match='CPVTPyramid is not JSON serializable'):
        HubModel('retinanet', backbone=CPVTPyramid('pcpvt_nano'), num_classes=4)
    with pytest.raises(ValueError, match='classes must name num_classes=4 labels, got 2'):
        HubModel('semantic_fpn', classes=['a', 'b'], **MODELS['semantic_fpn'])
    with pytest.raises(ValueError, match='pretrained cannot be an option'):
        HubModel('classifier', model_name='pcpvt_nano', pretrained=True)
    with pytest.raises(ValueError, match='unknown model .resnet18.; one of cpvt_base'):
        HubModel('classifier', model_name='resnet18')


def test_options_that_nothing_reads_are_refused(hub, tmp_path):
    model = HubModel('retinanet', **MODELS['retinanet'])
    model.save_pretrained(tmp_path / 'own', model_card_kwargs=dict(license='mit'))
    model.push_to_hub('digits', token='secret')
    known = 'revision, token, cache_dir, local_files_only, force_download'
    for source in (tmp_path / 'own', 'me/digits'):
        for options in (dict(num_classes=5), dict(foo=1, strict=False), dict(config={})):
            with pytest.raises(TypeError) as error:
                HubModel.from_pretrained(source, **options)
            assert str(error.value) == (
                f'from_pretrained has no option {", ".join(options)}, only {known}; '
                'options of the model are those in its config.json'
            )
    with pytest.raises(ValueError, match='own is a folder, which has no revision$'):
        HubModel.from_pretrained(tmp_path / 'own', revision='v2')
    HubModel.from_pretrained(tmp_path / 'own', revision=None, token='secret')
    HubModel.from_pretrained('me/digits', force_download=True, cache_dir=tmp_path / 'cache')

    for options in (dict(license='mit'), dict(repo_id='me/new'), dict(safe_serialization=False)):
        (name,) = options
        message = f'^save_pretrained has no option {name}, only push_to_hub, model_card_kwargs$'
        with pytest.raises(TypeError, match=message):
            model.save_pretrained(tmp_path / 'new', **options)
    with pytest.raises(TypeError, match='^push_to_hub has no option license, only commit_message'):
        model.push_to_hub('new', token='secret', license='mit')
    assert not (tmp_path / 'new').exists() and 'me/new' not in hub.repos
    with pytest.raises(TypeError, match='^save_pretrained has no option license, only repo_id, '):
        model.save_pretrained(tmp_path / 'new', push_to_hub=True, license='mit')
    model.save_pretrained(tmp_path / 'new', push_to_hub=True, repo_id='me/new', token='secret')
    assert set(hub.repos['me/new']) == FILES


def test_a_trained_model_moves_to_the_hub(tmp_path):
    options = MODELS['retinanet']
    trained = retinanet(**options).half()
    model = HubModel('retinanet', **options)
    model.model.load_state_dict(trained.state_dict())
    model.half().save_pretrained(tmp_path)
    saved = load_file(tmp_path / 'model.safetensors')
    assert saved['backbone.body.blocks.0.0.norm1.weight'].dtype == torch.half
    again = HubModel.from_pretrained(tmp_path).model.state_dict()
    assert all(torch.equal(x, again[name]) for name, x in trained.float().state_dict().items())


def test_the_page_about_the_hub(hub, capsys):
    page = (ROOT / 'docs/hub.md').read_text().replace('pcpvt_small', 'pcpvt_nano')
    first, with_timm, weights = re.findall(r'```python\n(.*?)```', page, re.S)
    target = dict(boxes=torch.tensor([[2.0, 3, 40, 50]]), labels=torch.tensor([1]))
    first = first.replace(
        'num_classes=10,', 'num_classes=10, score_thresh=0, min_size=64, out_channels=16,'
    )
    names = dict(images=[image()], targets=[target])
    exec(first, names)
    assert set(names['losses']) == {'classification', 'bbox_regression'}
    assert capsys.readouterr().out.split()[-1] in names['classes']
    classifier = HubModel('classifier', **MODELS['classifier'])
    classifier.push_to_hub('me/classifier', token='secret')
    exec(with_timm, names)
    assert 'model.safetensors' in hub.repos['me/other']
    file = save(CPVTPyramid('pcpvt_nano').state_dict())
    hub.repos['timm/twins_pcpvt_nano.in1k'] = {'model.safetensors': file}
    exec(weights, names)
    assert type(names['backbone']) is CPVTPyramid
