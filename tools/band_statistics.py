#!/usr/bin/env python
import sys

from cpvt_pyramid.__main__ import main

sys.exit(main(['band_statistics', *sys.argv[1:]]))
