"""The models on a GPU: the maps and gradients of the CPU, on every path."""

import contextlib
import re

import pytest
import torch
from gpu import DEVICE, VARIANTS, assert_near, assert_never_waits, twins
from support import ROOT

from cpvt_pyramid.grid import Grid, grid_of_windows
from cpvt_pyramid.model import MAX_BATCH, Attention, WindowAttention, set_checkpointing
from cpvt_pyramid.padding.mask import MASKED
from tests.models.ours import BACKBONES, VALID, images, maps_and_gradients, outputs
from tests.models.ports import randomize

small = pytest.mark.parametrize('name', BACKBONES)
padded = pytest.mark.parametrize('valid', [None, VALID], ids=['alone', 'padded'])
FLOAT32, BFLOAT16, FLOAT16, TF32 = 1e-4, 0.06, 0.02, 0.01  # relative errors of the norm


def to_device(valid):
    return None if valid is None else valid.to(DEVICE)


@pytest.mark.parametrize('name', VARIANTS)
def test_every_variant_equals_the_cpu(name):
    on_cpu, on_gpu = twins(VARIANTS[name])
    image = images(1, (96, 64))
    with torch.inference_mode():
        expected = outputs(on_cpu.eval(), image)
        assert_near(outputs(on_gpu.eval(), image.to(DEVICE)), expected, FLOAT32)


@contextlib.contextmanager
def tf32():
    torch.set_float32_matmul_precision('high')
    torch.backends.cudnn.allow_tf32 = True
    yield


def autocast(dtype):
    return lambda: torch.autocast(DEVICE, dtype)


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


def compiled(model):
    """With fixed sizes; dynamic ones fail in torch 2.13."""
    torch._dynamo.reset()
    return torch.compile(model, dynamic=False)


# The relative error, the context, and what is done to the model and to the image.
PATHS = {
    'float32': (FLOAT32,),
    'tf32': (TF32, tf32),
    'bfloat16': (BFLOAT16, autocast(torch.bfloat16)),
    'float16': (FLOAT16, autocast(torch.float16)),
    'channels-last': (2 * FLOAT32, contextlib.nullcontext, channels_last, channels_last),
    'compiled': (2 * FLOAT32, contextlib.nullcontext, compiled),
}


def run_path(
    model, image, valid, context=contextlib.nullcontext, change=lambda m: m, lay_out=lambda x: x
):
    with context():
        return maps_and_gradients(change(model), lay_out(image), valid)


@small
@padded
@pytest.mark.parametrize('path', PATHS)
def test_maps_and_gradients_equal_the_cpu(name, valid, path):
    on_cpu, on_gpu = twins(BACKBONES[name])
    maps, grads = maps_and_gradients(on_cpu, images(), valid)
    tolerance, *path = PATHS[path]
    got, got_grads = run_path(on_gpu.train(), images().to(DEVICE), to_device(valid), *path)
    assert_near(got, maps, tolerance)
    if tolerance >= TF32:  # then single weights may be farther off
        grads, got_grads = (
            torch.cat([g.double().cpu().flatten() for g in x]) for x in (grads, got_grads)
        )
        tolerance *= 2
    assert_near(got_grads, grads, tolerance)


@small
@padded
def test_an_image_of_a_padded_batch_equals_the_image_alone(name, valid):
    model = twins(BACKBONES[name])[1].eval()
    batch = images().to(DEVICE)
    with torch.inference_mode():
        maps = model(batch, to_device(valid))
        for i, (height, width) in enumerate(VALID.tolist() if valid is not None else [(100, 75)]):
            alone = model(batch[i : i + 1, :, :height, :width])
            inside = [x[i : i + 1, :, : y.shape[2], : y.shape[3]] for x, y in zip(maps, alone)]
            assert_near(inside, alone, FLOAT32)


@small
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_weights_of_lower_precision(name, dtype):
    on_cpu, on_gpu = twins(BACKBONES[name])
    with torch.inference_mode():
        expected = on_cpu.eval()(images())
        got = on_gpu.eval().to(dtype)(images().to(DEVICE, dtype))
    assert {x.dtype for x in got} == {dtype}
    assert_near(got, expected, BFLOAT16)


@small
def test_training_in_float16_with_loss_scaling(name):
    """An overflow skips the step and halves the scale; then the loss falls."""
    model = twins(BACKBONES[name])[1].train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40)
    batch, losses = images().to(DEVICE), []
    for _ in range(60):
        with torch.autocast(DEVICE, torch.float16):
            loss = sum(x.float().square().mean() for x in model(batch))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() < 2.0**40
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


@small
@padded
def test_checkpointing_changes_nothing_but_memory(name, valid):
    model = twins(BACKBONES[name])[1].train()
    batch, valid = images(4, (224, 224)).to(DEVICE), None if valid is None else VALID.repeat(2, 1)
    kept, results = [], []
    for enable in (False, True):
        set_checkpointing(model, enable)
        results.append(maps_and_gradients(model, batch, to_device(valid)))
        before = torch.cuda.memory_allocated()
        maps = model(batch, to_device(valid))
        kept.append(torch.cuda.memory_allocated() - before)
        del maps
    assert_near(results[1], results[0], FLOAT32)
    assert kept[1] < kept[0]


@small
@pytest.mark.parametrize('dynamic', [False, True], ids=['fixed', 'dynamic'])
def test_compiled_for_inference(name, dynamic):
    model = twins(BACKBONES[name])[1].eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=dynamic, fullgraph=True)
    for size in ((100, 75), (64, 128)):
        image = images(2, size).to(DEVICE)
        with torch.inference_mode():
            assert_near(compiled(image), model(image), FLOAT32)
            valid = to_device(VALID.clamp(max=64))
            assert_near(compiled(image, valid), model(image, valid), FLOAT32)


@small
@padded
def test_cuda_graph(name, valid):
    """A captured pass replays on other images, and on other true sizes."""
    model = twins(BACKBONES[name])[1].eval()
    batch, valid = images().to(DEVICE), to_device(valid)
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # as PyTorch asks for: a warm-up on another stream
            model(batch, valid)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            maps = model(batch, valid)
        batch.copy_(torch.randn_like(batch))
        if valid is not None:
            valid.copy_(valid.flip(0))
        graph.replay()
        assert_near([x.clone() for x in maps], model(batch, valid), FLOAT32)


def test_the_graph_of_the_docs():
    page = (ROOT / 'docs/performance.md').read_text()
    (code,) = (b for b in re.findall(r'```python\n(.*?)```', page, re.S) if 'CUDAGraph' in b)
    names = {}
    exec(code, names)
    with torch.inference_mode():
        assert_near(names['maps'], names['model'](names['image']), FLOAT32)


def test_more_windows_than_cuda_takes_in_a_batch():
    """Fused kernels refuse a batch above 65,535, the windows of a map of 1792 x 1792."""
    layer = randomize(WindowAttention(32, 1, 7)).to(DEVICE).eval()
    side = 7 * 260
    x = torch.randn(1, side, side, 32, device=DEVICE, requires_grad=True)
    assert (side // 7) ** 2 > MAX_BATCH
    grid = Grid(side, side, windows=grid_of_windows(x, None, 7))
    whole = layer(x, grid)
    (grad,) = torch.autograd.grad(whole.square().mean(), x)
    corner = x[:, :70, :140]
    part = layer(corner, Grid(70, 140, windows=grid_of_windows(corner, None, 7)))
    assert_near([whole[:, :70, :140]], [part], FLOAT32)
    assert grad.isfinite().all()


@pytest.mark.parametrize('keys', [4096, 3000])
def test_large_attention_uses_a_fused_kernel(keys):
    """The scores of all heads, 2 * 4096 * 16384 * 4 bytes, are never in memory."""
    q = torch.randn(1, 2, 16384, 32, device=DEVICE, dtype=torch.bfloat16)
    k = v = torch.randn(1, 2, 4096, 32, device=DEVICE, dtype=torch.bfloat16)
    hidden = None
    if keys < 4096:
        hidden = torch.zeros(1, 1, 1, 4096, device=DEVICE)
        hidden[..., keys:] = MASKED
    with torch.inference_mode():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = Attention(64, 2).attend(q, k, v, Grid(128, 128, key_bias=hidden))
        used = torch.cuda.max_memory_allocated() - before
        scores = q.float() @ k[:, :, :keys].float().transpose(2, 3) / 32**0.5
        expected = (scores.softmax(-1) @ v[:, :, :keys].float()).transpose(1, 2).flatten(2)
    assert_near([out], [expected], BFLOAT16)
    assert used < 2 * 4096 * 16384 * 2 / 4


@small
@padded
@pytest.mark.parametrize('with_cp', [False, True], ids=['kept', 'checkpointed'])
def test_a_training_step_never_waits_for_the_gpu(name, valid, with_cp):
    model = BACKBONES[name](drop_path_rate=0.2, with_cp=with_cp).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    batch, valid = images().to(DEVICE), to_device(valid)

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            maps = model(batch, valid)
        sum(x.float().square().mean() for x in maps).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_never_waits(step)
