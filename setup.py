"""The compiled modules; everything else about the project is in pyproject.toml."""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

# DATASTREAMER_CHECKED=1 builds with bounds checks and, if CFLAGS asks for it,
# with a sanitizer: slower, for the test suite (`make sanitize`).
checked = os.environ.get("DATASTREAMER_CHECKED") == "1"
flags = ["-O1", "-g"] if checked else ["-O3"]
modules = {
    "datastreamer._codec": ["datastreamer/_codec.pyx"],
    "datastreamer.arrow._columns": ["datastreamer/arrow/_columns.pyx"],
    "datastreamer._filtered": ["datastreamer/_filtered.pyx"],
    "datastreamer._pages": ["datastreamer/_pages.pyx"],
    "datastreamer._lines": ["datastreamer/_lines.pyx"],
    "datastreamer._packer": ["datastreamer/_packer.pyx"],
    "datastreamer.reassembly._ledger": ["datastreamer/reassembly/_ledger.pyx"],
    "datastreamer.reassembly._messages": ["datastreamer/reassembly/_messages.pyx"],
    "datastreamer.reassembly._reassembler": ["datastreamer/reassembly/_reassembler.pyx"],
    "datastreamer.storage.bookmarks._pairs": ["datastreamer/storage/bookmarks/_pairs.pyx"],
    "datastreamer.storage.bookmarks._blocks": ["datastreamer/storage/bookmarks/_blocks.pyx"],
    "datastreamer.storage.disk._commit": ["datastreamer/storage/disk/_commit.pyx"],
    "datastreamer.storage.sums._page_sums": ["datastreamer/storage/sums/_page_sums.pyx"],
    "datastreamer.storage.disk._placement": ["datastreamer/storage/disk/_placement.pyx"],
    "datastreamer.zkevm._wire": ["datastreamer/zkevm/_wire.pyx"],
    "datastreamer.server.streaming._fanout": ["datastreamer/server/streaming/_fanout.pyx"],
}

setup(
    ext_modules=cythonize(
        [Extension(name, sources, extra_compile_args=flags) for name, sources in modules.items()],
        compiler_directives={
            "language_level": 3,
            "embedsignature": False,
            "boundscheck": checked,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": checked,
            "freethreading_compatible": False,
        },
        annotate=False,
        quiet=True,
    ),
    # One compiler for each CPU: fifteen modules take a minute otherwise.
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
