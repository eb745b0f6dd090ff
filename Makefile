# Every target sets up what it needs in a virtual environment inside the checkout, and
# rebuilds it after a change of pyproject.toml, setup.py or a Cython source. `make` alone
# lists the targets.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
CYTHON := $(shell find datastreamer -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
BENCH ?= bench
ARGS ?=
# Run test files in three processes, also on two cores: most of them wait for a disk, a socket or
# a JVM at times. tests/conftest.py orders the files. A process that crashes ends the run, because
# a replacement makes the rest hang.
SIDE_BY_SIDE ?= -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PROTO := datastreamer/zkevm/proto/datastream.proto
FIGURES := .benchmarks/latest.json

.PHONY: help setup test demo spark-demo lint format types proto build bench soak sanitize clean distclean
.DELETE_ON_ERROR:

help:
	@echo "make test       run all tests            make demo      see it work, for some seconds"
	@echo "make spark-demo the pipeline on a live server: tables, a report, charts; needs Java"
	@echo "make lint       ruff                     make types     mypy, strict"
	@echo "make format     let ruff format          make build     wheel and sdist, in dist/"
	@echo "make bench      measure, one table       make soak      the long tests"
	@echo "make sanitize   the tests of the C code with bounds checks and AddressSanitizer"
	@echo "make proto      generate the protobuf classes, after a change of the .proto"
	@echo "make clean      remove what was built    make distclean  ... and the environment"
	@echo "PYTHON=... (now $(PYTHON), 3.10 or later), VENV=..., ARGS='options for pytest',"
	@echo "BENCH=bench/bench_codec.py (a part of the benchmarks)"

setup: $(VENV)/.built

test: setup
	$(PY) -m pytest $(SIDE_BY_SIDE) $(ARGS)

demo: setup
	@$(PY) examples/showcase.py

spark-demo: setup
	@rm -rf .spark-demo
	@$(PY) examples/spark_pipeline.py --demo .spark-demo

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: setup
	$(PY) -m mypy

proto: setup
	$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTO)

build: setup
	rm -rf dist
	$(PY) -m build

bench: setup
	@mkdir -p $(dir $(FIGURES))
	$(PY) -m pytest $(BENCH) --benchmark-only --benchmark-quiet --benchmark-json=$(FIGURES) $(ARGS)
	@$(PY) bench/table.py $(FIGURES)

soak: setup
	$(PY) -m pytest -m soak -o faulthandler_timeout=0 $(ARGS)

sanitize: setup
	PYTHON=$(abspath $(PY)) tests/sanitize.sh $(SIDE_BY_SIDE)

clean:
	rm -rf build dist *.egg-info .benchmarks .spark-demo .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f $(patsubst %.pyx,%.c,$(filter %.pyx,$(CYTHON))) $(VENV)/.built
	find datastreamer -name '*.so' -delete
	find datastreamer tests bench -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

$(VENV)/.created:
	@PYTHON='$(PYTHON)' .ci/python $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml setup.py $(VENV)/.created
	@echo "installing into $(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(CYTHON)
	@$(PY) setup.py --quiet build_ext --inplace
	@touch $@
