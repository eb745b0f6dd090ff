"""``python -m datastreamer``: the operator's tool."""

import sys

from datastreamer.cli.main import main

sys.exit(main())
