# Every target sets up what it needs in a virtual environment inside the checkout, and
# rebuilds it after a change of pyproject.toml, setup.py or a Cython source. `make demo` needs
# the package alone, the other targets also the tools of `[dev]`. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
CYTHON := $(shell find datastreamer -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
BENCH ?= bench
ARGS ?=
SPARK ?= 4.0
# Run test files in four processes, also on two cores: most of them wait for a disk, a socket or
# a JVM at times. tests/conftest.py orders the files. A process that crashes ends the run, because
# a replacement makes the rest hang.
SIDE_BY_SIDE ?= -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# The lower layers, which most changes concern, and the rules for all modules.
FAST := codec protocol transport storage/disk storage/header storage/read \
	test_architecture.py test_language.py test_public_names.py
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# Without bytecode each process of the tests compiles the package and all of pytest's plugins again.
unexport PYTHONDONTWRITEBYTECODE
PROTO := datastreamer/zkevm/proto/datastream.proto
FIGURES := .benchmarks/latest.json

.PHONY: help core setup jar test test-fast test-oldest test-spark test-lakes demo spark-demo lint format types proto build build-dsapp \
	docs wheels bench soak mutants sanitize clean distclean
.DELETE_ON_ERROR:

help:
	@echo "make test       run all tests            make demo      see it work, for some seconds"
	@echo "make spark-demo the pipeline on a live server: tables, a report, charts; needs Java"
	@echo "make lint       ruff, generated files    make types     mypy, strict"
	@echo "make format     let ruff format          make build     wheel and sdist, in dist/"
	@echo "make build-dsapp  the demo app of the Go program's users, as ./dsapp"
	@echo "make jar        the reader in Java for Spark; needs a JDK 17 and Maven"
	@echo "make bench      measure, one table       make soak      the long tests"
	@echo "make mutants    plant faults in the package: the tests have to find each"
	@echo "make sanitize   the tests of the C code with bounds checks, AddressSanitizer, ThreadSanitizer"
	@echo "make test-fast  the tests for an edit loop: the lower layers"
	@echo "make test-oldest  all tests, with the oldest dependencies that are allowed"
	@echo "make test-spark SPARK=4.0  the tests of Spark, with that version of it"
	@echo "make test-lakes SPARK=4.0  those of Delta and Iceberg tables, which Spark downloads"
	@echo "make proto      generate the protobuf classes, after a change of the .proto"
	@echo "make docs       the documentation as a site, with its links checked, in build/site/"
	@echo "make wheels     manylinux wheels for each CPython of this machine, tried, in dist/"
	@echo "make clean      remove what was built    make distclean  ... and the environment"
	@echo "PYTHON=... (now $(PYTHON), 3.11 or later), VENV=..., ARGS='options for pytest',"
	@echo "BENCH=bench/bench_codec.py (a part of the benchmarks)"

core: $(VENV)/.core $(VENV)/.built

setup: core $(VENV)/.dev

test: setup jar
	@mkdir -p build
	@$(PY) -m tests.spark.class_archive 2>build/class_archive.log || cat build/class_archive.log
	$(PY) -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-fast: setup
	$(PY) -m pytest $(SIDE_BY_SIDE) -m "not slow" $(FAST:%=tests/%) $(ARGS)

test-oldest: $(VENV)/.created
	@mkdir -p build
	@$(PY) .ci/requirements.py oldest >build/oldest.txt
	PIP_CONSTRAINT=$(abspath build/oldest.txt) $(MAKE) test VENV=.venv-oldest

# The tests of Spark with another version of it, in an environment of its own. ARGS may name some.
test-spark: setup jar
	@.ci/spark $(SPARK) $(VENV) $(or $(ARGS),$(SIDE_BY_SIDE) tests/spark)

# Delta and Iceberg: Spark downloads their packages to build/ivy.
test-lakes: setup jar
	@.ci/spark $(SPARK) $(VENV) --version
	@$(VENV)-spark-$(SPARK)/bin/python -m tests.spark.lakes 2>build/lakes.log || { cat build/lakes.log; exit 1; }
	@.ci/spark $(SPARK) $(VENV) -m soak tests/spark/test_delta.py $(ARGS)
	@.ci/spark $(SPARK) $(VENV) -m soak tests/spark/test_iceberg.py $(ARGS)

demo: core
	@$(PY) examples/showcase.py

spark-demo: setup
	@rm -rf .spark-demo
	@$(PY) examples/spark_pipeline.py --demo .spark-demo

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) .ci/blocking.py --check

format: setup
	$(PY) .ci/blocking.py
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: setup
	$(PY) -m mypy $(ARGS)

proto: setup
	$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTO)

# The reader in Java is a part of the wheel where there is a JDK to build it.
jar:
	@.ci/jar datastreamer/spark/native/datastreamer-spark.jar

build: setup jar
	rm -rf dist
	$(PY) -m build

build-dsapp: core
	cp $(VENV)/bin/dsapp dsapp

docs: setup $(VENV)/.docs
	$(PY) .ci/site.py pages build/pages
	$(VENV)/bin/zensical build --strict
	$(PY) .ci/site.py check build/site
	@echo "read it, with search: $(PY) -m http.server --directory build/site 8000, then http://localhost:8000"

# Compiles all modules for each Python of the machine.
wheels: jar
	.ci/wheels dist

bench: setup jar
	@mkdir -p $(dir $(FIGURES))
	$(PY) -m pytest $(BENCH) --benchmark-only --benchmark-quiet --benchmark-json=$(FIGURES) $(ARGS)
	@$(PY) bench/table.py $(FIGURES)

soak: setup
	$(PY) -m pytest -m soak -o faulthandler_timeout=0 $(ARGS)

mutants: setup
	$(PY) -m pytest $(SIDE_BY_SIDE) -m "mutants and not soak" $(ARGS)

sanitize: setup
	PYTHON=$(abspath $(PY)) tests/sanitize.sh $(SIDE_BY_SIDE)

clean:
	rm -rf dsapp build dist jvm/target *.egg-info .cache .benchmarks .spark-demo .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f $(patsubst %.pyx,%.c,$(filter %.pyx,$(CYTHON))) $(VENV)/.built
	find datastreamer -name '*.so' -delete -o -name '*.jar' -delete
	find datastreamer tests bench -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VENV)-spark-* .venv-oldest

$(VENV)/.created:
	@PYTHON='$(PYTHON)' .ci/python $(VENV)
	@touch $@

$(VENV)/.tools: pyproject.toml $(VENV)/.created
	@echo "installing setuptools and Cython"
	@$(PY) .ci/requirements.py build | $(PIP) --requirement /dev/stdin
	@touch $@

$(VENV)/.built: setup.py $(CYTHON) $(VENV)/.tools
	@$(PY) setup.py --quiet build_ext --inplace
	@touch $@

# pip alone would build all modules again, in an environment of its own.
$(VENV)/.core: pyproject.toml setup.py | $(VENV)/.built
	@echo "installing datastreamer and the packages that it needs"
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing the tools for tests, checks and Spark: about 1 GB, some minutes"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.dev
	@$(PY) .ci/requirements.py docs | $(PIP) --requirement /dev/stdin
	@touch $@
