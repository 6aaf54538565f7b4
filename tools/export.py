#!/usr/bin/env python
import sys

from cpvt_pyramid.__main__ import main

sys.exit(main(['export', *sys.argv[1:]]))
