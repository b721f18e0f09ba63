package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// FuzzStatus: whatever an object holds, reading it ends without a panic, and gives certificates or an error.
func FuzzStatus(f *testing.F) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		f.Fatal(err)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		f.Fatal(err)
	}
	p := &Parent{config: Config{Namespace: "a", Issuer: "b", Kind: "Issuer", Group: "cert-manager.io", TTL: time.Hour}}
	own, err := p.object("name", der).MarshalJSON()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(own)
	for _, s := range []string{
		`{"apiVersion":"a","kind":"b"}`,
		`{"apiVersion":"a","kind":"b","status":{"conditions":[{"type":"Ready","status":"True"},7,null,"x",{"type":1}],"certificate":"AAAA","ca":[]}}`,
		`{"apiVersion":"a","kind":"b","spec":{"request":"LS0tLS1CRUdJTg==","isCA":"yes","duration":5,"issuerRef":[]},"status":{"conditions":{}}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		o := new(unstructured.Unstructured)
		if o.UnmarshalJSON(data) != nil {
			return
		}
		state := conditions(o)
		state.bad()
		state.waitsFor()
		p.ours(o, csr)
		if chain, err := signed(o); err == nil && len(chain) == 0 {
			t.Error("neither certificates nor an error")
		}
	})
}
