"""What the reader in Java (`jvm/`) asks of Python: plans, and the rows of what it does not read."""
