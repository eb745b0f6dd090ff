#!/bin/sh
# Spark's Python processes with the installed pyspark. Spark puts a zip file of it on PYTHONPATH,
# from which each process compiles every module anew: a second instead of a quarter.
PYTHONPATH="$TESTS_ROOT" exec "$TESTS_PYTHON" "$@"
