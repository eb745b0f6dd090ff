"""The version of this package, in the one place that packaging, the CLI and metrics read."""

from typing import Final

__version__: Final = "0.1.0"
