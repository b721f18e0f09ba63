package csr

import (
	"encoding/pem"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	istio "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
)

// FuzzMessages reads messages of both APIs off the wire. What they ask for is taken as it is or refused: no lifetime wraps
// around, no identity is substituted, and one CSR gets the same answer from both.
func FuzzMessages(f *testing.F) {
	add := func(m proto.Message) {
		data, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	for _, tc := range csrCases(f) {
		text := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: tc.der}))
		for _, v := range []any{nil, webURI, 3.0, "", []any{webURI}} {
			meta, err := structpb.NewStruct(map[string]any{"ImpersonatedIdentity": v})
			if err != nil {
				f.Fatal(err)
			}
			add(&istio.IstioCertificateRequest{Csr: text, ValidityDuration: 1 << 62, Metadata: meta})
		}
		add(&chanceryv1.IssueRequest{Requests: []*chanceryv1.CertificateRequest{{Csr: tc.der, SpiffeId: webURI, Lifetime: durationpb.New(time.Hour)}, nil}})
	}
	add(&chanceryv1.IssueRequest{Requests: []*chanceryv1.CertificateRequest{{Lifetime: &durationpb.Duration{Seconds: 1 << 62, Nanos: -1}}}})
	id := mustID(f, webURI)
	f.Fuzz(func(t *testing.T, wire []byte) {
		var i istio.IstioCertificateRequest
		if proto.Unmarshal(wire, &i) == nil {
			if ttl, err := ca.Seconds(i.GetValidityDuration()); err == nil && (ttl > 0) != (i.GetValidityDuration() > 0) {
				t.Errorf("%d s became %s", i.GetValidityDuration(), ttl)
			}
			asked := impersonated(&i)
			if v := i.GetMetadata().GetFields()["ImpersonatedIdentity"]; v != nil && v.Kind != nil && asked == "" && v.GetStringValue() != "" {
				t.Errorf("%v became the caller's own identity", v)
			}
			if der, d := decodePEM(i.GetCsr()); d == nil {
				pub, d := parseCSR(der, id, only(id))
				r := chanceryv1.CertificateRequest{Csr: der}
				again, d2 := parseCSR(r.GetCsr(), id, only(id))
				if (pub == nil) != (again == nil) || (d == nil) != (d2 == nil) {
					t.Errorf("one CSR, two answers: %v, %v", d, d2)
				}
			}
		}
		var n chanceryv1.IssueRequest
		if proto.Unmarshal(wire, &n) != nil {
			return
		}
		for _, r := range n.GetRequests() {
			l := r.GetLifetime()
			if ttl, d := lifetimeOf(r); d == nil && l != nil && (ttl.Seconds() > float64(l.GetSeconds())+1 || ttl.Seconds() < float64(l.GetSeconds())-1) {
				t.Errorf("%v became %s", l, ttl)
			}
			if pub, d := parseCSR(r.GetCsr(), id, only(id)); (pub == nil) == (d == nil) {
				t.Errorf("key %v and refusal %v", pub, d)
			} else if d != nil && strings.Contains(d.Detail, "\x00") {
				t.Errorf("raw bytes in %q", d.Detail)
			}
		}
	})
}
