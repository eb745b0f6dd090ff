"""What the commands share: options, output, exit codes, signals."""
