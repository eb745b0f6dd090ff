"""Options, input, output, exit codes and signals, shared by the commands."""
