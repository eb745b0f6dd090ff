"""Check, repair, report and snapshot of a stream file."""
