"""Leave out the files that compare with models of the mm packages where these are missing."""

import importlib.util
import re
from pathlib import Path

collect_ignore = []
if importlib.util.find_spec('mmengine') is None:
    needs_mm = re.compile(r'^\s*(from|import) (foreign|mm\w+|cpvt_pyramid\.mm)\b', re.M)
    here = Path(__file__).parent
    collect_ignore = [p.name for p in here.glob('test_*.py') if needs_mm.search(p.read_text())]
    collect_ignore.append('test_doctor.py')  # which finds the whole environment in order
