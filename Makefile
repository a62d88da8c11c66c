# One command each. Every target sets up what it needs, once.
PYTHON ?= python3
PROMPT ?= The capital of France is
# Two processes, each with whole files: what a file sets up is set up once.
TOGETHER ?= -n 2 --dist loadfile

.PHONY: demo test test-fast test-arm lint bench setup clean

## from nothing: a small real model continues a prompt through 2 stations and 8 shards
demo: setup
	.venv/bin/knot run smol -p "$(PROMPT)" -n 24 --temperature 0

## from nothing: every test
test: setup node_modules/.package-lock.json
	@for model in smol q05 q15; do .venv/bin/knot fetch $$model || exit 1; done
	@$(PYTHON) scripts/rust.py cargo test --quiet
	.venv/bin/python -m pytest $(TOGETHER)

## the tests that need no model, no network and no Node
test-fast: setup
	.venv/bin/python -m pytest $(TOGETHER) -m "not wasm and not models and not slow and not workerd"

## the tests of the Rust crate on a 64-bit ARM processor that QEMU plays
test-arm:
	@$(PYTHON) scripts/test_arm.py

## formatting, lints and types, of Python and Rust
lint: setup node_modules/.package-lock.json
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	node_modules/.bin/pyright
	@$(PYTHON) scripts/rust.py cargo fmt --check
	@$(PYTHON) scripts/rust.py cargo clippy --quiet --all-targets --features python -- -D warnings

## the benchmarks that fit a coffee break; `python -m bench` lists all
bench: setup
	.venv/bin/python -m bench all

setup:
	@$(PYTHON) scripts/setup.py

node_modules/.package-lock.json: package.json package-lock.json
	npm ci --silent --no-fund --no-audit
	@touch $@

clean:
	rm -rf .venv build target node_modules .pytest_cache .ruff_cache .hypothesis
