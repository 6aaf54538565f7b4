#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['train', *sys.argv[1:]]))
