"""What the entries of a zkEVM sequencer's stream mean."""
