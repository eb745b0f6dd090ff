"""Processes: embedded servers, daemons, workers, systemd, logs."""
