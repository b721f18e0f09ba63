package server

import (
	"context"
	"crypto"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca/keys"
)

// started runs a server with more lines in its config until it is ready, and until stop is called.
func started(t *testing.T, more string) (srv *Server, stop func()) {
	t.Helper()
	return startedOn(t, "{sqlite: state.db}", more)
}

// startedOn is started with another state.
func startedOn(t *testing.T, state, more string) (srv *Server, stop func()) {
	t.Helper()
	dir := t.TempDir()
	text := strings.Replace(minimal, "{sqlite: state/state.db}", state, 1) + "listen: 127.0.0.1:0\nmetrics: 127.0.0.1:0\n" + more
	s, err := parseConfig([]byte(text), filepath.Join(dir, "server.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "jwks.json"), []byte(keySet), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Init(t.Context(), s, t.Output()); err != nil {
		t.Fatal(err)
	}
	if srv, err = Open(t.Context(), s, discard); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	if _, _, err := srv.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- srv.Run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	return srv, func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

// A server whose issuer's key does not sign is not ready. The root's key is needed once in half a week only: that it
// fails is seen in metric and log, and workloads go on.
func TestFailingKeyAndReadiness(t *testing.T) {
	srv, stop := started(t, "")
	stop()
	if len(srv.authority.Keys()) != 2 {
		t.Fatalf("%d keys are watched", len(srv.authority.Keys()))
	}
	failing := func(context.Context) (crypto.Signer, error) { return nil, errors.New("the token is gone") }
	for _, failed := range srv.authority.Keys() {
		ctx, cancel := context.WithCancel(t.Context())
		srv.health = keys.NewHealth(keys.HealthConfig{Logger: discard, Metrics: prometheus.NewRegistry(), Keys: func() []keys.Watched {
			list := srv.authority.Keys()
			for i := range list {
				if list[i].Name == failed.Name {
					list[i].Open = failing
				}
			}
			return list
		}})
		done := make(chan error)
		go func() { done <- srv.health.Run(ctx) }()
		for srv.health.Err(failed.Name) == nil {
			runtime.Gosched()
		}
		err := srv.ready()
		if isIssuer := failed.Name == srv.authority.KeyName(); (err != nil) != isIssuer || isIssuer && !strings.Contains(err.Error(), "the token is gone") {
			t.Errorf("with the key of %s failing: %v", failed.Name, err)
		}
		cancel()
		<-done
	}
}

// TestKeysConfig holds what the comments of keystore.Config say.
func TestKeysConfig(t *testing.T) {
	for in, want := range map[string]string{
		"":                             "",
		"keys: {type: p384}":           "",
		"keys: {dir: k}":               "keys: dir and passphraseFile belong together",
		"keys: {passphraseFile: k}":    "keys: dir and passphraseFile belong together",
		"keys: {pkcs11: 'pkcs11:a=b'}": "keys.pkcs11: attribute \"a\"",
		"keys: {pkcs11: softhsm}":      "keys.pkcs11: it should be like",
		"keys: {dir: k, pkcs11: x}":    "keys: more than one of dir, secrets, pkcs11 and kms",
		"keys: {type: dsa}":            "keys.type: key type \"dsa\"",
		"keys: {dir: k, passphraseFile: p, type: rsa}":                                         "",
		"keys: {type: ed25519, pkcs11: 'pkcs11:module-path=/x.so;token=a?pin-source=/p'}":      "keys.type: tokens and clouds make",
		"keys: {secrets: {namespace: ns, kubeconfig: f}}":                                      "",
		"keys: {secrets: {namespace: ns, inCluster: true}, type: mldsa65}":                     "",
		"keys: {secrets: {namespace: ns}}":                                                     "keys.secrets: set one of",
		"keys: {secrets: {namespace: ns, kubeconfig: f, inCluster: true}}":                     "keys.secrets: set one of",
		"keys: {secrets: {kubeconfig: f}}":                                                     "keys.secrets.namespace: \"\"",
		"keys: {secrets: {namespace: a/b, kubeconfig: f}}":                                     "keys.secrets.namespace: \"a/b\"",
		"keys: {secrets: {namespace: ns, colour: red}}":                                        "keys.secrets.colour",
		"keys: {secrets: {namespace: ns, inCluster: true}, dir: k}":                            "keys: more than one of",
		"keys: {kms: 'awskms:region=eu-central-1', type: p384}":                                "",
		"keys: {kms: 'awskms:region=eu-central-1', type: mldsa65}":                             "keys.type: tokens and clouds make",
		"keys: {kms: 'awskms:profile=a'}":                                                      "keys.kms: region is missing",
		"keys: {kms: 'vault:a=b'}":                                                             "keys.kms: it should be like awskms:",
		"keys: {kms: 'awskms:region=eu-central-1', secrets: {namespace: ns, inCluster: true}}": "keys: more than one of",
		"issuer: {tls: /x}\nkeys: {type: p384}":                                                "issuer and keys are both set",
	} {
		s, err := parseConfig([]byte(minimal+in+"\n"), "/etc/chancery/server.yaml")
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %v, want %q", in, err, want)
		}
		if err == nil && s.Keys.Dir != "" && (s.Keys.Dir != "/etc/chancery/k" || s.Keys.PassphraseFile != "/etc/chancery/p") {
			t.Errorf("paths do not count from the file's folder: %+v", s.Keys)
		}
		if err == nil && s.Keys.Secrets != nil && s.Keys.Secrets.Kubeconfig != "" && s.Keys.Secrets.Kubeconfig != "/etc/chancery/f" {
			t.Errorf("the kubeconfig's path does not count from the file's folder: %+v", s.Keys.Secrets)
		}
	}
}
