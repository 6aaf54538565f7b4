"""Checkpoints of any bytes and of any structure: they load, or one error says why not.

After an error the model is as it was, no file is new and none has changed.
"""

import copy
import io
import math
from pathlib import Path

import pytest
import torch
from damage import damaged
from foreign import TINY, of_mmseg, of_timm
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import BAD, NAMES
from safetensors.torch import save as safetensors_bytes
from support import load_tool

from cpvt_pyramid import CPVTPyramid, load_weights
from cpvt_pyramid.checkpoints.reading import read_checkpoint

FUZZ = settings.get_profile('fuzz')
convert_weights = load_tool('convert_weights')
SOURCES = {'timm': of_timm('svt').state_dict(), 'mmseg': of_mmseg('pcpvt').state_dict()}
MODELS = {'timm': CPVTPyramid(TINY['svt']), 'mmseg': CPVTPyramid(TINY['pcpvt'])}
INITIAL = copy.deepcopy({source: model.state_dict() for source, model in MODELS.items()})
FORMATS = st.sampled_from(['timm', 'mmseg', 'official'])


def pth_bytes(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


FILES = {
    ('timm', 'a.safetensors'): safetensors_bytes(SOURCES['timm']),
    ('mmseg', 'a.pth'): pth_bytes({'state_dict': SOURCES['mmseg'], 'meta': {'epoch': 3}}),
}


def loads_or_refuses(source: str, load) -> bool:
    """Whether it loads: all weights finite, floating point, and of the model's shapes."""
    model, initial = MODELS[source], INITIAL[source]
    try:
        load(model)
    except (ValueError, FileNotFoundError) as error:
        assert 0 < len(str(error)) < 1000
        assert all(torch.equal(v, initial[k]) for k, v in model.state_dict().items())
        return False
    assert all(v.dtype == torch.float32 and v.isfinite().all() for v in model.parameters())
    model.load_state_dict(initial)
    return True


def converts_or_refuses(path: Path, to: str, folder: Path) -> None:
    """With exit status 0 and a file that loads again, or 2 and no file."""
    before = path.read_bytes()
    status = convert_weights.main([str(path), '--to', to, '--out-dir', str(folder)])
    written = list(folder.rglob('*.*')) if folder.exists() else []
    assert (status, len(written)) in ((0, 1), (2, 0))
    for file in written:
        read_checkpoint(file)
        file.unlink()
    assert path.read_bytes() == before


@pytest.mark.parametrize('source, name', FILES)
@settings(FUZZ)
@given(data=st.data())
def test_bytes(source, name, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp('bytes', numbered=True)
    path = folder / name
    path.write_bytes(data.draw(damaged(FILES[source, name])))
    loads_or_refuses(source, lambda model: load_weights(model, path))
    converts_or_refuses(path, data.draw(FORMATS), folder / 'o')


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.builds(torch.zeros, st.lists(st.integers(0, 4), max_size=5)),
    st.builds(lambda n: torch.full((n,), math.nan), st.integers(0, 3)),
)
names = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from([k for tensors in SOURCES.values() for k in tensors]),
    st.text(max_size=20),
)
wrappers = st.sampled_from(['state_dict', 'model', 'model_ema', 'ema_state_dict', 'module', 'x', 3])
prefixes = st.sampled_from(['', 'module.', 'backbone.', '_orig_mod.', 'module.backbone.', 'x.'])


@st.composite
def checkpoints(draw, tensors: dict) -> object:
    """A good checkpoint with some of its tensors missing, changed, renamed or added, wrapped."""
    content = dict(tensors)
    keys = list(tensors)
    for _ in range(draw(st.integers(0, 4))):
        key, change = draw(st.sampled_from(keys)), draw(st.integers(0, 4))
        if change == 0:
            content.pop(key, None)
        elif change == 1:
            content[key] = BAD[draw(st.sampled_from(list(BAD)))](tensors[key])
        elif change == 2:
            content[draw(names)] = content.pop(key, None)
        elif change == 3:
            content[draw(names)] = draw(values)
        else:
            content[key] = tensors[draw(st.sampled_from(keys))]
    prefix = draw(prefixes)
    if prefix:
        content = {f'{prefix}{k}' if isinstance(k, str) else k: v for k, v in content.items()}
    for _ in range(draw(st.integers(0, 2))):
        content = {draw(wrappers): content, draw(names): draw(values)}
    return content


@pytest.mark.parametrize('source', SOURCES)
@settings(FUZZ)
@given(data=st.data())
def test_structure(source, data, tmp_path_factory):
    content = data.draw(checkpoints(SOURCES[source]))
    folder = tmp_path_factory.mktemp('structure', numbered=True)
    try:
        torch.save(content, folder / 'a.pth')
    except (RuntimeError, NotImplementedError):  # a tensor that torch does not save
        return
    loads_or_refuses(source, lambda model: load_weights(model, folder / 'a.pth'))
    converts_or_refuses(folder / 'a.pth', data.draw(FORMATS), folder / 'o')
