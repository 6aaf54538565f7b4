#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['tile_data', *sys.argv[1:]]))
