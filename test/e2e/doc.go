// Package e2e holds the end-to-end tests: Chancery's own binary next to a real kube-apiserver with etcd, real Envoys and a
// real Istio pilot-agent, all on loopback.
//
// It owns the harness that starts and stops those parts (files tools, process, kube, tokens, pki, envoy, load, pilot, sds, product)
// and the tests of the whole. It refuses mocks, fixed waits and fixed ports, and is imported by nobody: all of it but this
// comment lies in _test.go files.
//
// The tools come from `test/tools/install.sh`. A test whose tool is missing is skipped, or fails when CI=true; `go test
// -short` skips every test that starts a process.
package e2e
