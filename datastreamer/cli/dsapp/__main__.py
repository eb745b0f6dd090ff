"""``python -m datastreamer.cli.dsapp``."""

import sys

from datastreamer.cli.dsapp import main

sys.exit(main())
