#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['new_config', *sys.argv[1:]]))
