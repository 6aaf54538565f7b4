#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['curves', *sys.argv[1:]]))
