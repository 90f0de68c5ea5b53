# Everything runs in .venv, made from the pinned requirements on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

STOCK := .venv-stock
STOCK_STAMP := $(STOCK)/.installed

NODE_STAMP := examples/javascript/node_modules/.package-lock.json

PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: demo test quick lint clean

$(STAMP): requirements.txt requirements-dev.txt constraints.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

# Stock ONNX Runtimes, oldest and newest, each in an environment of its own: artifacts of --target onnxruntime are run there.
$(STOCK_STAMP): requirements-stock-1.19.2.txt requirements-stock-current.txt constraints.txt
	for version in 1.19.2 current; do \
		$(PYTHON) -m venv $(STOCK)/$$version && \
		$(STOCK)/$$version/bin/python -m pip install --quiet -r requirements-stock-$$version.txt || exit 1; \
	done
	touch $(STOCK_STAMP)

# ONNX Runtime for Node.js, whose library the C example runs on too; without npm their tests are skipped.
$(NODE_STAMP): examples/javascript/package.json examples/javascript/package-lock.json
	if command -v npm > /dev/null; then npm ci --ignore-scripts --silent --prefix examples/javascript; \
	else echo "there is no npm: the JavaScript example is not tested"; fi

# A ResNet-18 compiled to 60 % of its activations and trained on scikit-learn's digits.
demo: $(STAMP)
	$(BIN)/python examples/digits.py

# All tests, slow ones too, on up to four cores; torch keeps to one in each process.
test: $(STAMP) $(STOCK_STAMP) $(NODE_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) --durations 40

# The tests that take seconds.
quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(STOCK) build dist demo_out *.egg-info examples/javascript/node_modules .pytest_cache .mypy_cache .ruff_cache
