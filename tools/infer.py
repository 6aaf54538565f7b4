#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['infer', *sys.argv[1:]]))
