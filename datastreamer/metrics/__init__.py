"""What is counted, under which names: for Prometheus and for whoever asks as JSON.

`names.py` has every metric, `block.py` the writer's numbers in memory that processes share,
`exposition.py` what is made of samples. Knows no stream, no server and no socket; who has
something to tell gives plain samples.
"""
