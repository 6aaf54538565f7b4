#!/usr/bin/env python
import sys

from _checkout import main

sys.exit(main(['analyse', *sys.argv[1:]]))
