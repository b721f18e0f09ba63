# Everything a developer types. `make run` and `make test` set up what they need on a fresh machine with Go, Python and make.
export GOTOOLCHAIN := go1.27.3
GO ?= go

.PHONY: run build check test tools bench generate fuzz

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
	$(GO) test -v -count=1 -timeout 30m ./test/e2e
	$(GO) test $$($(GO) list ./... | grep -v /test/e2e)

bench: build ## each claim of speed against a floor or a peer in the same run
	CHANCERY_BIN=$(CURDIR)/bin/chancery $(GO) run ./test/bench/csr

generate: ## code from api/chanceryv1/chancery.proto
	bash test/tools/install.sh protoc
	$(GO) generate ./...

fuzz: ## 30 s for each fuzz target
	bash test/fuzz.sh 30s
