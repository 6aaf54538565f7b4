#!/usr/bin/env python
import sys

from cpvt_pyramid.__main__ import main

sys.exit(main(['analyse', *sys.argv[1:]]))
