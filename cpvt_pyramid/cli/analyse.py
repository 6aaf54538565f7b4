"""Analyse the results of a test, as one HTML page.

    cpvt test CONFIG CHECKPOINT --out results.pkl
    cpvt analyse CONFIG results.pkl

For detectors: AP by class and size, precision and recall, the kinds of errors of TIDE, a confusion
matrix. For segmentors: IoU by class and a confusion matrix. For both, the worst images. The page
holds its pictures; the numbers are written next to it as JSON. See docs/results.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..tooling.command import UserError, check_at_least, run_command


def analyse(
    config: str,
    results: str,
    *,
    out: str = 'analysis.html',
    score_thr: Optional[float] = None,
    worst: int = 12,
    cfg_options: Sequence[str] = (),
) -> None:
    """Analyse the results of a test.

    Args:
        config: config file of the test.
        results: what cpvt test --out wrote, or for detectors COCO results (JSON).
        out: the page; the numbers are written to FILE.json.
        score_thr: detections with a lower score are not in the confusion matrix and in
            pictures; by default 0.3.
        worst: number of images to show.
        cfg_options: override settings of the config.
    """
    import json

    from ..config.check import check_data
    from ..config.load import load_config
    from ..predict.predictor import check_score_thr
    from ..runner.analysis.analyse import analyse_results
    from ..tooling.files import atomic_write, check_file, write_text
    from ..tooling.pages import html_page

    if not out.endswith('.html'):
        raise UserError(f'--out must end in .html, got {out}')
    check_score_thr(score_thr)
    check_at_least('--worst', worst, 0)
    check_file(out)
    cfg = load_config(config, cfg_options)
    check_data(cfg, 'test')
    found = analyse_results(cfg, Path(results), score_thr, worst)
    with atomic_write(out) as file:
        page = html_page(f'{Path(config).stem}: {Path(results).name}', config, found.sections)
        file.write_text(page, encoding='utf-8')
    # null for what does not exist, which JSON has no nan for
    numbers = json.loads(json.dumps(found.numbers), parse_constant=lambda _: None)
    write_text(Path(out).with_suffix('.json'), json.dumps(numbers))
    for metric, numbers in found.numbers.items():
        shown = {name: value for name, value in numbers.items() if isinstance(value, float)}
        print(f'{metric}: ' + ', '.join(f'{name} {value:.4f}' for name, value in shown.items()))
    print(out)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(analyse, argv)
