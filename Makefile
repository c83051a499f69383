# The main targets are `make run` and `make test`; `make help` lists the others.

CARGO ?= cargo

# rust-toolchain.toml pins the toolchain. If the installed stable toolchain has that version, it is used.
PINNED := $(shell sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
ifeq ($(shell rustc +stable --version 2>/dev/null | cut -d' ' -f2),$(PINNED))
export RUSTUP_TOOLCHAIN := stable
endif

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)

# The linter compiles the workspace for the tests, so that nothing is compiled a second time to be linted.
LINTED := RUSTC_WORKSPACE_WRAPPER=$(shell rustup which clippy-driver 2>/dev/null || command -v clippy-driver) \
	CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__

.PHONY: help run chat check test soak setup models prebuilt build install dist fmt lint names deny doc docs unit clients ledger bench screenshots

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 16

# PREBUILT=ARCHIVE, the path or https address of a halo-VERSION-linux-MACHINE.tar.gz beside its SHA256SUMS, is used instead of a build.
HALO := $(if $(PREBUILT),target/prebuilt/bin/halo,target/release/halo)

run: $(if $(PREBUILT),prebuilt,build) ## install what is missing, build, download the default models, serve the page; LISTEN=127.0.0.1:5002 sets the address
	@$(HALO) models pull
	@$(HALO) serve $(if $(LISTEN),--listen $(LISTEN))

chat: $(if $(PREBUILT),prebuilt,build) ## the same, but chat in the terminal
	@$(HALO) models pull
	@$(HALO) chat

prebuilt:
	@case "$(PREBUILT)" in */halo-$(VERSION)-linux-*.tar.gz | halo-$(VERSION)-linux-*.tar.gz) ;; *) echo "PREBUILT: $(PREBUILT) is not halo $(VERSION) for Linux"; exit 1 ;; esac
	@sh packaging/install.sh target/prebuilt "$(PREBUILT)" >/dev/null

check: fmt names deny ## format, lints, names, and the tests that need no model; under three minutes warm
	@scripts/lint
	$(LINTED) scripts/fast-tests

test: setup fmt names deny lint unit clients ledger ## everything but the soak tests

soak: doc ## documentation, and the property, fuzz and load tests with many more cases; KOBOLD_LITE=FILE tests that page too
	scripts/deny
	HALO_HOSTILE=10000 HALO_RUNS=10000 HALO_FORGET_CASES=300 HALO_KILLS=300 HALO_TEST_THOROUGH=1 $(CARGO) test --workspace --locked
	HALO_HOSTILE=1000000 $(CARGO) test --workspace --locked --test it hostile_requests
	HALO_LEASE_ROUNDS=200 HALO_HISTORY_OPERATIONS=10000 $(CARGO) test --package halo-store --locked --test it -- lease
	$(CARGO) build --release --locked --package halo --package halo-bench
	target/release/halo-bench simulate --minutes 180
	target/release/halo-bench crash
	scripts/fuzz 600
	scripts/kills --kills 200
	scripts/kills --kills 100 --store postgres
	scripts/soak-batch --minutes 120
	HALO_ONE_SHOTS=10000 HALO_LONG_HISTORY=100000 HALO_CASES=1000 HALO_DAMAGED_FILES=500 scripts/clients
	HALO_CASES=1000 target/venv/bin/python -m pytest -q -p no:cacheprovider tests/soak_clients.py
	scripts/published-templates
	scripts/tool-model
	scripts/sillytavern
	[ -z "$(KOBOLD_LITE)" ] || scripts/kobold-lite "$(KOBOLD_LITE)"

setup: ## install missing packages, or print which ones to install
	@scripts/setup

models: ## download the models that the tests run on
	@scripts/models

build:
	@scripts/setup run
	@[ -e target/release/halo ] || echo "building: the first time takes about ten minutes on two cores and 2 GB of disk"
	$(CARGO) build --release --locked --package halo

PREFIX ?= $(HOME)/.local

install: build ## put halo, its completions and its man pages below PREFIX (~/.local)
	@scripts/install "$(PREFIX)"

dist: ## packages for Linux in target/dist: archive, wheel, .deb, npm, with checksums; as root, scripts/dist-test tries them in fresh systems
	@scripts/dist $(MACHINE)

fmt:
	$(CARGO) fmt --all --check

names: ## vocabulary: unique type names, deny-listed phrases, error kinds instead of error texts, no file cycles, no dead links
	@scripts/names
	@scripts/cycles
	@scripts/links

deny: ## licences, banned crates, wildcard versions and sources, as deny.toml allows them
	@scripts/deny

lint:
	@scripts/lint

doc:
	RUSTDOCFLAGS="--deny warnings" $(CARGO) doc --workspace --no-deps --locked --quiet

docs: ## the pages of docs/ as a book (mdBook), in target/book
	@scripts/links
	@command -v mdbook >/dev/null 2>&1 || { echo "docs: mdbook is missing: install it with 'cargo install --locked mdbook'"; exit 1; }
	@mdbook build
	@echo "target/book/index.html"

unit: # downloads run while the compiler works; no crate has examples in its documentation to run
	@mkdir -p target
	@{ scripts/models && scripts/client-packages; } >target/downloads.log 2>&1 & downloads=$$!; \
	echo "cargo test --workspace --all-targets --no-run"; \
	$(LINTED) $(CARGO) test --workspace --all-targets --no-run --locked && \
	{ wait $$downloads || { cat target/downloads.log; exit 1; }; }
	HALO_ALL_TESTS_BUILT=1 $(LINTED) $(CARGO) test --workspace --locked --tests

clients: ## the real program in a browser and with other programs' clients
	@scripts/clients

screenshots: ## a picture of each view of the page, light and dark, desktop and phone, in target/screenshots
	@scripts/venv
	$(CARGO) build --locked --package halo
	@target/venv/bin/python scripts/screenshots

ledger: ## count the requirements that are done
	@HALO_ALL_TESTS_BUILT=1 $(LINTED) $(CARGO) test --workspace --locked --quiet --lib --bins --test it requirements -- --nocapture

bench: ## measure the figures of the core on this machine
	$(CARGO) build --release --locked --package halo-bench
	@target/release/halo-bench core
