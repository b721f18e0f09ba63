// Package parts owns what several benchmarks are made of: processes that they start and what these use, a server with its config and
// authority, and tokens of pods. It refuses to measure or to judge anything.
package parts
