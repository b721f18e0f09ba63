#!/bin/sh
# Generates the Go code of the .proto files with the pinned protoc of .tools and the plugins that go.mod pins.
set -eu
cd "$(dirname "$0")"
tools=${CHANCERY_TOOLS:-$PWD/../../.tools}
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
go build -o "$bin" google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
PATH="$bin:$PATH" "$tools/protoc" -I . --go_out=. --go_opt=paths=source_relative \
	--go-grpc_out=. --go-grpc_opt=paths=source_relative chancery.proto issuers.proto
