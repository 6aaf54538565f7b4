#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['export', *sys.argv[1:]]))
