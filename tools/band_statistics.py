#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['band_statistics', *sys.argv[1:]]))
