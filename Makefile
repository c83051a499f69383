# The two commands that matter: `make run` and `make test`. Everything else is a part of them.

CARGO ?= cargo

.PHONY: help run chat test setup models build fmt lint doc unit clients ledger bench

help: ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 16

run: build ## installs what is missing, builds, fetches the default models, and serves the page; LISTEN=127.0.0.1:5002 elsewhere
	@target/release/halo models pull
	@target/release/halo serve $(if $(LISTEN),--listen $(LISTEN))

chat: build ## the same, and talks in the terminal
	@target/release/halo models pull
	@target/release/halo chat

test: setup models fmt lint doc unit clients ledger ## everything: format, clippy, documentation, tests, browser and clients, the ledger

setup: ## installs what is missing, or says what to install
	@scripts/setup

models: ## fetches the model that the tests run on
	@scripts/models

build:
	@scripts/setup run
	@[ -e target/release/halo ] || echo "building: the first time takes about ten minutes on two processors, and 2 GB of disk"
	$(CARGO) build --release --locked --package halo

fmt:
	$(CARGO) fmt --all --check

lint:
	$(CARGO) clippy --workspace --all-targets --locked -- --deny warnings

doc:
	RUSTDOCFLAGS="--deny warnings" $(CARGO) doc --workspace --no-deps --locked --quiet

unit:
	$(CARGO) test --workspace --locked

clients: ## the real program in a browser and with the clients of others
	@scripts/clients

ledger: ## which of the 333 requirements work
	@$(CARGO) test --workspace --locked --quiet --test ledger -- --nocapture

bench: build ## the figures that the core claims, measured here
	@target/release/halo bench core
