import pytest
import torch

from benchmarks import gpu


def test_a_case():
    """On a CPU, whose operations count as kernels."""
    case = gpu.Case('pcpvt_small', 'forward', 'float32', 2, 64, 96, padded=True)
    for measured in gpu.Bench('cpu', tiny=True).measure(case):
        assert measured.ms >= measured.host_ms > 0
        assert measured.kernels > 1000 and measured.kernel_ms > 0


def test_true_sizes():
    case = gpu.Case('svt_small', 'forward', 'float32', 3, 64, 96, padded=True)
    sizes = gpu.Bench('cpu', tiny=True).valid_sizes(case).tolist()
    assert sizes[0] == [64, 96] and sizes[1] != sizes[2]


def test_what_has_no_time_is_listed(tmp_path, capsys):
    out = tmp_path / 'out'
    options = ['--device', 'cpu', '--tiny', '--minutes', '0.01', '--out', str(out)]
    assert gpu.main(options) == 0
    measured, left_out = (out / 'report.md').read_text().split('## Not measured')
    assert 'ms, host' not in measured
    assert '- pcpvt_small, forward, bfloat16, 2 x 64 x 96, eager, padded\n' in left_out
    assert '- layer norms\n' in left_out


def test_a_failed_case_is_a_row(tmp_path):
    """A GPU's memory may not suffice for all."""

    class OutOfMemory(gpu.Bench):
        def measure(self, case):
            raise RuntimeError('out of memory\nmore lines')

    report = gpu.Report(str(tmp_path), 'cpu', end=float('inf'))
    case = gpu.Case('pcpvt_small', 'forward', 'bfloat16', 32, 512, 512)
    report.add_case(OutOfMemory('cpu', tiny=True), case)
    assert '| failed: out of memory |' in report.page.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_no_gpu(capsys):
    assert gpu.main([]) == 2
    assert 'finds no GPU' in capsys.readouterr().err
