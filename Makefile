# Everything but check, race, fuzz, bench, lint and sec needs Go, make and git only.

BINARY    := kvgate
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS   := -s -w -X main.buildVersion=$(VERSION)

PREFIX    ?= /usr/local
DESTDIR   ?=
SYSCONF   ?= /etc
UNITDIR   ?= $(PREFIX)/lib/systemd/system

FUZZTIME  ?= 30s
FUZZ      ?= .
BENCH     ?= .
COUNT     ?= 6
OLD       ?=
ARGS      ?=

# Tools are pinned, compiled once into .bin under a name that carries the
# version, and take no part in go.mod.
BIN            := $(CURDIR)/.bin
GOLANGCI       := v2.15.0
BENCHSTAT      := v0.0.0-20260908200009-22c9c6c9d4da
GOSEC          := v2.30.0
GOVULNCHECK    := v1.9.0
golangci_lint  := $(BIN)/golangci-lint-$(GOLANGCI)
benchstat      := $(BIN)/benchstat-$(BENCHSTAT)
gosec          := $(BIN)/gosec-$(GOSEC)
govulncheck    := $(BIN)/govulncheck-$(GOVULNCHECK)

# Stop at the first failing command of a recipe; plain sh will do.
.SHELLFLAGS := -ec
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# at_once FROM TO writes a program in one piece: Linux 6.18 was seen to keep it in huge
# pages then (ext4), and to run it from them (docs/operations.md).
at_once = dd if='$(1)' of='$(2).new' bs=67108864 2>/dev/null && chmod 0755 '$(2).new' && mv -f '$(2).new' '$(2)'

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "; print "Targets:"} \
		/^[a-z][a-z-]*:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Variables: ARGS (demo, soak, bench-proxy), VULNDB (sec), PEERS (install-peers, bench-proxy), ORACLE_PYTHON and ORACLE_ARGS (tokenizer-oracle), FUZZTIME and FUZZ (fuzz), BENCH, COUNT and OLD (bench), PREFIX and DESTDIR (install)'

.PHONY: build
build: ## Build the static binary ./kvgate
	@mkdir -p '$(BIN)'
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o '$(BIN)/$(BINARY)' .
	$(call at_once,$(BIN)/$(BINARY),$(BINARY))

.PHONY: demo
demo: build ## Four fake replicas, the gateway and a comparison: make demo ARGS=--once
	./$(BINARY) demo $(ARGS)

.PHONY: install
install: build ## Install binary, systemd unit and example settings under DESTDIR and PREFIX
	install -d '$(DESTDIR)$(PREFIX)/bin' '$(DESTDIR)$(UNITDIR)' '$(DESTDIR)$(SYSCONF)/kvgate' '$(DESTDIR)$(SYSCONF)/default'
	$(call at_once,$(BINARY),$(DESTDIR)$(PREFIX)/bin/$(BINARY))
	install -m 0644 configs/systemd/kvgate.service '$(DESTDIR)$(UNITDIR)/kvgate.service'
	install -m 0644 configs/systemd/kvgate.socket '$(DESTDIR)$(UNITDIR)/kvgate.socket'
	sed -i 's|/usr/bin/kvgate|$(PREFIX)/bin/$(BINARY)|; s|/etc/|$(SYSCONF)/|g' '$(DESTDIR)$(UNITDIR)/kvgate.service'
	@# What an administrator may have edited stays as it is.
	for pair in 'kvgate.yaml kvgate/config.yaml' 'systemd/kvgate.default default/kvgate'; do \
		set -- $$pair; to='$(DESTDIR)$(SYSCONF)'/$$2; \
		if [ -e "$$to" ]; then echo "kept $$to"; else install -m 0644 configs/$$1 "$$to"; fi; \
	done

.PHONY: soak
soak: build ## Aborts, restarts and reloads under load for minutes: make soak ARGS='--duration 1m'
	./$(BINARY) bench soak $(ARGS)

.PHONY: test
test: ## Run every test
	go test ./...

.PHONY: race
race: ## Run every test under the race detector (needs gcc)
	@command -v "$$(go env CC | cut -d' ' -f1)" >/dev/null || { \
		echo "make race: no C compiler '$$(go env CC)': the race detector needs cgo. Install gcc (Debian: apt-get install gcc libc6-dev)." >&2; exit 1; }
	CGO_ENABLED=1 go test -race ./...

.PHONY: lint
lint: $(golangci_lint) ## Run golangci-lint (compiled once, minutes)
	$(golangci_lint) run

# What gosec may not complain of, as a rule; single places are explained by #nosec.
#   G103  unsafe: strings over bytes that are not written any more, each with its comment
#   G115  narrowing of integers: sizes and counts are bounded before, and fuzzed
#   G304  files whose names the operator has written
#   G404  math/rand: spread, samples, request ids; nothing is secret that it makes
# bench/ starts the programs that it is told to and writes reports.
GOSEC_EXCLUDE := G103,G115,G304,G404

.PHONY: sec
sec: $(gosec) $(govulncheck) ## Run gosec and govulncheck (VULNDB: another database than vuln.go.dev, a URL or file:///FOLDER)
	$(gosec) -quiet -exclude=$(GOSEC_EXCLUDE) -exclude-dir=bench ./...
	$(govulncheck) $(if $(VULNDB),-db '$(VULNDB)') ./...

.PHONY: vulndb
vulndb: ## Make govulncheck's database of the Go module golang.org/x/vulndb: make sec VULNDB=file://$PWD/.bin/vulndb
	GOBIN='$(BIN)' go install golang.org/x/vulndb/cmd/indexdb@latest
	dir=$$(go mod download -json golang.org/x/vulndb@latest | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'); \
	rm -rf '$(BIN)/vulndb'; '$(BIN)/indexdb' -vulns "$$dir/data/osv" -out '$(BIN)/vulndb'

.PHONY: check
check: ## Formatting, vet, lint, tidy go.mod, race tests: what a change must pass
	@files=$$(gofmt -l .); [ -z "$$files" ] || { echo "not formatted, run gofmt -w:" $$files >&2; exit 1; }
	go vet ./...
	go mod tidy -diff
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory race

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME each
	@packages=$$(go list ./...); \
	for pkg in $$packages; do \
		listed=$$(go test -list '^Fuzz' $$pkg); \
		for target in $$(echo "$$listed" | grep '^Fuzz' | grep -e '$(FUZZ)'); do \
			echo "== $$pkg $$target"; \
			go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x $$pkg; \
		done; \
	done

.PHONY: bench
bench: $(benchstat) ## Run the Go benchmarks; OLD=FILE compares with an earlier bench.txt
	go test -run '^$$' -bench '$(BENCH)' -benchmem -count $(COUNT) ./... > bench.txt || { cat bench.txt; exit 1; }
	$(benchstat) $(OLD) bench.txt

ORACLE        ?= $(BIN)/tokenizer-oracle
ORACLE_PYTHON ?= python3
ORACLE_ARGS   ?=

.PHONY: tokenizer-oracle
tokenizer-oracle: ## Compare tokens and chat templates with Python's tokenizers and transformers (needs both, and npm)
	$(ORACLE_PYTHON) bench/oracle/tokenizer.py --out '$(ORACLE)' $(ORACLE_ARGS)
	KVGATE_TOKENIZER_ORACLE='$(ORACLE)' go test ./routing -run '^Test(Tokenizer|Template)Oracle$$' -count 1 -v

PEERS     ?= $(BIN)/peers

.PHONY: routing-table
routing-table: build ## Run the routing lab again: rewrite the tables and plots of docs/routing-quality.md (an hour)
	./$(BINARY) bench routing --update docs/routing-quality.md $(ARGS)

.PHONY: routing-gates
routing-gates: build ## Check the quick claims about routing quality: make routing-gates ARGS='--gate hand' for the others
	./$(BINARY) bench routing --gate ci $(ARGS)

.PHONY: install-peers
install-peers: ## Install what bench-proxy compares with, into PEERS
	sh bench/install-peers.sh '$(PEERS)'

.PHONY: bench-proxy
bench-proxy: build ## Measure kvgate beside nginx, haproxy, Envoy, smg, vllm-router: make bench-proxy ARGS='--rounds 3'
	./$(BINARY) bench proxy --tools '$(PEERS)' --results bench/results $(ARGS)

.PHONY: cover
cover: ## Report test coverage; the page is cover.html
	go test -coverpkg=./... -coverprofile=cover.out ./...
	go tool cover -html=cover.out -o cover.html
	go tool cover -func=cover.out | tail -n 1

.PHONY: clean
clean: ## Remove what the targets made, the tools included
	rm -rf $(BINARY) $(BIN) bench.txt cover.out cover.html

# go install names the file after the package: the version is added when it is complete.
$(golangci_lint):
	GOBIN='$(BIN)' go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)
	mv '$(BIN)/golangci-lint' $@

$(gosec):
	GOBIN='$(BIN)' go install github.com/securego/gosec/v2/cmd/gosec@$(GOSEC)
	mv '$(BIN)/gosec' $@

$(govulncheck):
	GOBIN='$(BIN)' go install golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK)
	mv '$(BIN)/govulncheck' $@

$(benchstat):
	GOBIN='$(BIN)' go install golang.org/x/perf/cmd/benchstat@$(BENCHSTAT)
	mv '$(BIN)/benchstat' $@
