"""The header page: records, recovery, inspection, undo journal."""
