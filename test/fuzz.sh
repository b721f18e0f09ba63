#!/usr/bin/env bash
# Runs every fuzz target for a time, as many at once as there are processors, each with one worker: fuzz.sh 30s [PATTERN [REST]]
# PATTERN is of the targets' names and folders, such as 'FuzzCSR' or 'ca/'; with REST, a time, those that it does not match run for
# that long. All run, also after one that fails.
# An input that fails lies in testdata/fuzz beside the target: it becomes a seed, to be committed with the fix.
set -euo pipefail
cd "$(dirname "$0")/.."
fuzztime=${1:-30s} pattern=${2:-.} rest=${3:-}

one() {
	dir=$1 target=$2 FUZZTIME=$3
	begun=$SECONDS
	# A long minimisation of inputs would eat the whole time.
	if out=$(go test -run '^$' -fuzz "^$target\$" -fuzztime "$FUZZTIME" -fuzzminimizetime 10x -parallel 1 "$dir" </dev/null 2>&1); then
		execs=$(grep -oE 'execs: [0-9]+' <<<"$out" | tail -1 || true)
		echo "ok   $dir $target: ${execs:-no execs}, $((SECONDS - begun)) s"
	else
		printf 'FAIL %s %s\n%s\n' "$dir" "$target" "$out"
		return 1
	fi
}
export -f one

grep -roE '^func Fuzz[A-Za-z0-9_]+' --include='*_test.go' . |
	sed -E 's|^(.*)/[^/]+:func (Fuzz.*)$|\1 \2|' | sort | while read -r where target; do
	if grep -qE "$pattern" <<<"$where $target"; then
		echo "$where $target $fuzztime"
	elif [ -n "$rest" ]; then
		echo "$where $target $rest"
	fi
done | xargs -r -P "$(nproc)" -n 3 bash -c 'one "$0" "$1" "$2"' # xargs ends with an error if one of them did
