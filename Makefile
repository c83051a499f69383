# The main targets are `make run` and `make test`; `make help` lists the others.

CARGO ?= cargo

# rust-toolchain.toml pins the toolchain. If the installed stable toolchain has that version, it is used.
PINNED := $(shell sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
ifeq ($(shell rustc +stable --version 2>/dev/null | cut -d' ' -f2),$(PINNED))
export RUSTUP_TOOLCHAIN := stable
endif

# Crates whose tests need neither a model nor a database server.
FAST := halo-core halo-agents halo-worlds halo-engine halo-server halo-remote

.PHONY: help run chat check test soak setup models build fmt lint names deny doc unit clients ledger bench

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 16

run: build ## install what is missing, build, download the default models, serve the page; LISTEN=127.0.0.1:5002 sets the address
	@target/release/halo models pull
	@target/release/halo serve $(if $(LISTEN),--listen $(LISTEN))

chat: build ## the same, but chat in the terminal
	@target/release/halo models pull
	@target/release/halo chat

check: fmt names deny ## format, lints, names, and the tests that need no model; under three minutes warm
	@scripts/lint
	$(CARGO) clippy --workspace --all-targets --locked -- --deny warnings
	$(CARGO) test --locked --lib --bins $(FAST:%=-p %) -p halo-store -p halo-recall -p halo-llama
	$(CARGO) test --locked --test it $(FAST:%=-p %)

test: setup models fmt names lint unit clients ledger ## everything but the soak tests

soak: doc ## documentation, and the property, fuzz and load tests with many more cases
	HALO_HOSTILE=10000 HALO_RUNS=10000 HALO_TEST_THOROUGH=1 $(CARGO) test --workspace --locked
	HALO_ONE_SHOTS=10000 HALO_LONG_HISTORY=300000 scripts/clients

setup: ## install missing packages, or print which ones to install
	@scripts/setup

models: ## download the models that the tests run on
	@scripts/models

build:
	@scripts/setup run
	@[ -e target/release/halo ] || echo "building: the first time takes about ten minutes on two cores and 2 GB of disk"
	$(CARGO) build --release --locked --package halo

fmt:
	$(CARGO) fmt --all --check

names: ## vocabulary: unique type names, deny-listed phrases, error kinds instead of error texts, no file cycles
	@scripts/names
	@scripts/cycles

deny: ## licences, banned crates and sources, where cargo-deny is installed
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny check licenses bans sources; \
	else echo "deny: cargo-deny is not installed; skipped"; fi

lint:
	@scripts/lint
	$(CARGO) clippy --workspace --all-targets --locked -- --deny warnings

doc:
	RUSTDOCFLAGS="--deny warnings" $(CARGO) doc --workspace --no-deps --locked --quiet

unit:
	$(CARGO) test --workspace --locked

clients: ## the real program in a browser and with other programs' clients
	@scripts/clients

ledger: ## count the requirements that are done
	@$(CARGO) test --locked --quiet -p halo --test it requirements -- --nocapture

bench: ## measure the figures of the core on this machine
	$(CARGO) build --release --locked --package halo-bench
	@target/release/halo-bench core
