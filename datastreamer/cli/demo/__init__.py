"""The made-up sequencer of the demos."""
