#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['timm_run', *sys.argv[1:]]))
