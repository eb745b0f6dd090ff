"""Metrics: their names, the counters, and their exposition to Prometheus and as JSON.

`names.py` lists every metric, `counters.py` has a server's counters, `block.py` the writer's
counters in shared memory, `exposition.py` merges samples and formats them. Knows no stream,
server or socket; a part that reports metrics hands over plain samples.
"""
