"""Files: operations, atomic creation, access, the compiled commit."""
