"""The compiled modules; everything else about the project is in pyproject.toml."""

from __future__ import annotations

import itertools
import os
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# DATASTREAMER_CHECKED=1 builds with bounds checks and, if CFLAGS asks for it,
# with a sanitizer: slower, for the test suite (`make sanitize`).
CHECKED = os.environ.get("DATASTREAMER_CHECKED") == "1"
COMPILE = ["-O1", "-g"] if CHECKED else ["-O3", "-g0"]
# Symbols that only a debugger reads double the size of an installed module.
LINK = ["-Wl,-s"] if sys.platform == "linux" and not CHECKED else []
CORES = os.cpu_count() or 1

MODULES = [
    "datastreamer._codec",
    "datastreamer._filtered",
    "datastreamer._lines",
    "datastreamer._packer",
    "datastreamer._pages",
    "datastreamer.arrow._columns",
    "datastreamer.protocol._queries",
    "datastreamer.reassembly._memory",
    "datastreamer.reassembly._messages",
    "datastreamer.reassembly._reassembler",
    "datastreamer.server.answers._at_hand",
    "datastreamer.server.streaming._feed_pass",
    "datastreamer.server._inotify",
    "datastreamer.server.streaming._live_thread",
    "datastreamer.storage.bookmarks._at_hand",
    "datastreamer.storage.bookmarks._blocks",
    "datastreamer.storage.bookmarks._pairs",
    "datastreamer.storage.disk._commit",
    "datastreamer.storage.disk._placement",
    "datastreamer.storage.read._at_hand",
    "datastreamer.storage.pages._page_sums",
    "datastreamer.storage.summaries._counting",
    "datastreamer.storage.read._head",
    "datastreamer.storage.write._lane",
    "datastreamer.storage.write._stream_end",
    "datastreamer.zkevm._rlp",
    "datastreamer.zkevm._wire",
]


class Build(build_ext):
    """Translates and compiles on all cores, and prints what it does and how far it is."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or CORES
        if self.inplace:
            # pip builds an editable install in temporary folders, in which nothing is up to date.
            self.build_lib = self.build_temp = f"build/inplace-{sys.implementation.cache_tag}"

    def build_extensions(self) -> None:
        print(f"building {len(self.extensions)} modules on {CORES} cores", flush=True)
        translated = cythonize(
            self.extensions,
            nthreads=CORES,
            compiler_directives={
                "language_level": 3,
                "embedsignature": False,
                "boundscheck": CHECKED,
                "wraparound": False,
                "cdivision": True,
                "initializedcheck": CHECKED,
                "freethreading_compatible": False,
            },
        )
        for extension, made in zip(self.extensions, translated, strict=True):
            extension.sources, extension.depends = made.sources, [*made.depends, "setup.py"]
        self.built = itertools.count(1)
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        super().build_extension(ext)
        print(f"  {next(self.built)} of {len(self.extensions)}: {ext.name}", flush=True)


# Cython's processes may import this file again.
if __name__ == "__main__":
    setup(
        cmdclass={"build_ext": Build},
        ext_modules=[
            Extension(
                name,
                [f"{name.replace('.', '/')}.pyx"],
                extra_compile_args=COMPILE,
                extra_link_args=LINK,
            )
            for name in MODULES
        ],
    )
