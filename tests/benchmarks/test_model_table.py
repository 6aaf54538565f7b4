"""Counts for the table of models, and sections of pages."""

import pytest

from benchmarks.model_table import pyramid_row
from benchmarks.pages import with_section

PAGE = """\
# Page

<!-- models: benchmarks/model_table.py -->
old
<!-- end of models -->
after
"""


def test_published_flops():
    """Those of Twins' paper. Attention counts, with and without windows."""
    for arch, published in (('svt_small', '2.9'), ('pcpvt_small', '3.8')):
        assert pyramid_row(arch)[3] == published


def test_a_section_is_replaced_and_nothing_else():
    assert with_section(PAGE, 'models', 'new\n') == PAGE.replace('old', 'new')


@pytest.mark.parametrize('page', ['', PAGE + PAGE, PAGE.replace('<!-- end of models -->', '')])
def test_a_page_without_the_section(page):
    with pytest.raises(ValueError, match='must have the comments <!-- models: PROGRAM --> and'):
        with_section(page, 'models', 'new')
