#!/usr/bin/env bash
# Runs every fuzz target for a time: fuzz.sh 30s
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-30s}
grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r file; do
	dir=$(dirname "$file")
	grep -oE '^func Fuzz[A-Za-z0-9_]+' "$file" | sed 's/^func //' | while read -r target; do
		echo "fuzz $dir $target"
		# A long minimisation of inputs would eat the whole time.
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 10x "$dir" </dev/null
	done
done
