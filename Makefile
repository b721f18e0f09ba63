# Everything a developer types. `make run` and `make test` set up what they need on a fresh machine with Go, Python and make.
export GOTOOLCHAIN := go1.27.3
GO ?= go

# PKCS#11 needs cgo; all else is built without.
PKCS11_TEST = CGO_ENABLED=1 $(GO) test -tags pkcs11 -run 'SoftHSM' ./ca/keys/pkcs11 ./cmd/chancery/server

# AWS KMS against local-kms, a server that speaks its protocol.
AWS_TEST = $(GO) test -tags awskms -run AWS ./ca/keys/kms ./cmd/chancery/server

# Rotations on real parts run by themselves: they are about time.
ROTATIONS = ^Test(Ring|RingLeaves|D4PausedReplica|AgentOffDuringRotation|NACKBlocksRotation|D17Migration)$$

.PHONY: run build check test soak tools bench generate fuzz

run: build ## start everything embedded; ARGS="--svid-ttl 20s" shows rotation
	./bin/chancery dev $(ARGS)

build:
	$(GO) build -trimpath -o bin/chancery ./cmd/chancery

check: ## what runs before each commit: seconds, no test tools
	test -z "$$(gofmt -l .)" || { gofmt -l .; exit 1; }
	$(GO) vet ./...
	$(GO) test -short ./...

tools: ## the pinned test tools into .tools/; minutes the first time on a machine
	bash test/tools/install.sh

test: tools ## all tests, with the real parts
	$(GO) test -v -count=1 -timeout 30m -skip '$(ROTATIONS)' ./test/e2e
	$(GO) test -v -count=1 -timeout 20m -parallel 4 -run '$(ROTATIONS)' ./test/e2e
	$(GO) test -v -count=1 -run 'Exploration|Mutants' ./rotate/stages
	$(GO) test $$($(GO) list ./... | grep -v /test/e2e)
	$(AWS_TEST)
	@if $$($(GO) env CC) --version >/dev/null 2>&1; then \
		echo $(PKCS11_TEST); $(PKCS11_TEST); \
	else echo "no C compiler: the tests with SoftHSM2 are skipped"; test "$$CI" != true; fi

soak: tools ## rotations under kill -9 with ever new seeds, for RING_SOAK (2h); RING_SEED=N repeats one
	RING_SOAK=$${RING_SOAK:-2h} $(GO) test -v -count=1 -timeout 0 -run '^TestRingSoak$$' ./test/e2e

bench: build ## each claim of speed against a floor or a peer in the same run
	CHANCERY_BIN=$(CURDIR)/bin/chancery $(GO) run ./test/bench/csr
	CHANCERY_BIN=$(CURDIR)/bin/chancery $(GO) run ./test/bench/csr -issuance-log
	CHANCERY_BIN=$(CURDIR)/bin/chancery $(GO) run ./test/bench/csr -two-servers
	CHANCERY_BIN=$(CURDIR)/bin/chancery $(GO) run ./test/bench/csr -two-servers -unbounded
	CHANCERY_BIN=$(CURDIR)/bin/chancery $(GO) run ./test/bench/log
	CHANCERY_BIN=$(CURDIR)/bin/chancery $(GO) run ./test/bench/push
	CHANCERY_BIN=$(CURDIR)/bin/chancery $(GO) run ./test/bench/reissue
	$(GO) run ./test/bench/verify
	$(GO) run ./test/bench/naming
	FLEET_AGENTS=10000 $(GO) test -count=1 -v -run AFleet ./cmd/chancery/agent

generate: ## code from api/chanceryv1/chancery.proto
	bash test/tools/install.sh protoc
	$(GO) generate ./...

fuzz: ## 30 s for each fuzz target
	bash test/fuzz.sh 30s
