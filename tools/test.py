#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['test', *sys.argv[1:]]))
