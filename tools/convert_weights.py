#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['convert_weights', *sys.argv[1:]]))
