"""The web page: its function, the page as a client sees it, and mistakes on the command line."""

import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from cpvt_pyramid import app
from cpvt_pyramid.runtime import Predictor
from cpvt_pyramid.runtime.predictor import ExportedModel


@pytest.fixture
def pictures(photos) -> list[Image.Image]:
    return [Image.fromarray(photo) for photo in photos]


def test_an_image_alone_and_in_a_batch(model, pictures):
    boxes, labels = ExportedModel(model('detection')), ExportedModel(model('labels'))
    assert app.alone_and_together(boxes, None, pictures[0], 40, 0.3) == (None, None, '')
    expected = Predictor('detection.onnx')(pictures[0])
    alone, together, text = app.alone_and_together(boxes, pictures[0], None, 40, 0.3)
    assert (alone, together, text) == (expected.draw(), None, f'{expected.summary()}.')
    alone, together, text = app.alone_and_together(boxes, *pictures[:2], 20, 0.1)
    assert alone == together and text.endswith(
        '. In a batch with the second image, padded to 29 x 30: '
        'the same boxes to within 0 pixels, and scores to within 0.'
    )
    _, _, text = app.alone_and_together(boxes, *pictures[:2], 20, 1.0)
    assert text.startswith('nothing. ') and text.endswith('and scores to within 0.')
    _, _, text = app.alone_and_together(labels, *pictures[:2], 40, 0.3)
    assert text.count('%') == 3 and text.endswith(': 0 of 12103 pixels have another class.')
    # A batch that changes something is noticed.
    honest, moved = (Predictor(model('box'), score_thr=0.1)(pictures[3]) for _ in range(2))
    fewer = app.difference_in_words(honest, honest.above(honest.scores[0]))
    assert fewer == 'other boxes, 1 instead of 2'
    moved.boxes[0, 2] += 0.5
    moved.masks[1, :2, :2] ^= True
    expected = 'the same boxes to within 0.5 pixels, and scores to within 0; 4 mask pixels differ'
    assert app.difference_in_words(honest, moved) == expected


def test_the_page_is_served(model, pictures):
    pictures[0].save('0.png')
    pictures[1].save('1.png')
    pictures[0].convert('F').save('float.tif')
    deep = np.array(pictures[0].convert('L')).astype(np.uint16) * 256
    Image.fromarray(deep).save('deep.png')
    page = app.build_page(ExportedModel(model('detection')), [Path('0.png'), Path('1.png')])
    try:
        _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, server_name='127.0.0.1')
        client = Client(address, verbose=False, httpx_kwargs={'trust_env': False})
        files = handle_file('0.png'), handle_file('1.png')
        alone, together, text = client.predict(*files, 40, 0.1, api_name='/predict')
        drawn, _, _ = client.predict(handle_file('deep.png'), None, 40, 0.1, api_name='/predict')
        with pytest.raises(AppError, match='must have 8 or 16 bits a channel, got 32'):
            client.predict(handle_file('float.tif'), None, 40, 0.1, api_name='/predict')
    finally:
        page.close()
    assert '. In a batch' in text and Path(alone).read_bytes() == Path(together).read_bytes()
    expected = Predictor('detection.onnx', score_thr=0.1)('deep.png').draw()
    np.testing.assert_array_equal(np.array(Image.open(drawn)), np.array(expected))


def test_mistakes(model, monkeypatch, capsys):
    path = str(model('detection'))
    with socket.create_server(('127.0.0.1', 0)) as other:
        port = str(other.getsockname()[1])
        for arguments, complaint in (
            (['no.onnx'], 'no model at no.onnx'),
            ([path, '--samples', 'nowhere'], 'no folder at nowhere'),
            ([path, '--port', port], f'cannot listen on 127.0.0.1:{port}: '),
            ([path], "pip install 'cpvt_pyramid[app]'"),
        ):
            if arguments == [path]:
                monkeypatch.setitem(sys.modules, 'gradio', None)
            assert app.main(arguments) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert complaint in line
