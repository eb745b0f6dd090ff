"""The demo sequencer of `demo` and `dsapp server`."""
