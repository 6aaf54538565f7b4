#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['get_flops', *sys.argv[1:]]))
