package document

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

const web = "spiffe://cluster.local/ns/foo/sa/web"

// TestDocumentFromBeforeRevocationsLoads: a document without the fields of today is read, and one with a field of tomorrow
// is not passed over.
func TestDocumentFromBeforeRevocationsLoads(t *testing.T) {
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	enclose := func(raw string) []byte {
		return must(json.Marshal(envelope{json.RawMessage(raw), sealer.MAC([]byte(raw))}))
	}
	old := `{"format":1,"version":3,"domains":{"cluster.local":{"generation":1,"authorities":[]}},"logs":[{"id":16909060}]}`
	d, err := Decode(enclose(old), 3, sealer)
	if err != nil || len(d.Revocations(td)) != 0 || d.State(td).CRLNumber != 0 {
		t.Fatalf("%+v, %v", d, err)
	}
	if again := string(must(json.Marshal(d))); again != old {
		t.Errorf("unchanged, it is written as %s", again)
	}
	for _, field := range []string{`"revocation":[]`, `"revocations":[{"id":"a","serials":"b"}]`} {
		if _, err := Decode(enclose(strings.Replace(old, `"generation"`, field+`,"generation"`, 1)), 3, sealer); err == nil || !strings.Contains(err.Error(), "unknown field") {
			t.Errorf("%s: %v", field, err)
		}
	}
	now := time.Now().UTC()
	if _, err := d.Revoke(td, Revocation{Predicate: Predicate{Cluster: "east", Node: "n", IssuedBefore: &now}, Time: now, Actor: "a", Reason: 1}); err != nil {
		t.Fatal(err)
	}
	back, err := Decode(must(d.Encode(sealer)), 3, sealer)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := must(json.Marshal(d.Revocations(td))), must(json.Marshal(back.Revocations(td))); string(a) != string(b) {
		t.Errorf("%s became %s", a, b)
	}
}

func TestPredicates(t *testing.T) {
	now := time.Now()
	later := now.Add(time.Hour)
	for _, tc := range []struct {
		p    Predicate
		want string // in the error; "" = none
	}{
		{Predicate{Serial: "01ab"}, ""}, {Predicate{SPIFFEID: web}, ""}, {Predicate{IssuedBefore: &now}, ""},
		{Predicate{Cluster: "east", Node: "n"}, ""}, {Predicate{Cluster: "east", Node: "n", IssuedBefore: &now}, ""},
		{Predicate{}, "exactly one"}, {Predicate{Serial: "01", SPIFFEID: web}, "exactly one"}, {Predicate{SPIFFEID: web, Cluster: "e", Node: "n"}, "exactly one"},
		{Predicate{Serial: "01", IssuedBefore: &now}, "exactly one"},
		{Predicate{Serial: "AB"}, "lower case"}, {Predicate{Serial: "1"}, "hex"}, {Predicate{Serial: "00ab"}, "without zeros"},
		{Predicate{Serial: strings.Repeat("11", 21)}, "1 to 20 bytes"}, {Predicate{Serial: "xx"}, "hex"},
		{Predicate{Serial: "7" + strings.Repeat("f", 39)}, ""}, {Predicate{Serial: "8" + strings.Repeat("0", 39)}, "can be no certificate's"},
		{Predicate{SPIFFEID: "spiffe://other/ns/foo/sa/web"}, "trust domain cluster.local"},
		{Predicate{SPIFFEID: "spiffe://cluster.local/chancery/server"}, "not a workload's"}, {Predicate{SPIFFEID: "web"}, "spiffe"},
		{Predicate{IssuedBefore: &later}, "future"}, {Predicate{Node: "n"}, "cluster"}, {Predicate{Cluster: "e", Node: strings.Repeat("n", 254)}, "253"},
	} {
		err := tc.p.Check([]trust.Domain{td}, now)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.p.String(), err, tc.want)
		}
	}
}

func TestRevocationsAreBoundedAndForgotten(t *testing.T) {
	d := New()
	now := time.Now().UTC()
	over := now.Add(-time.Hour)
	for i := range MaxRevocations {
		r := Revocation{ID: fmt.Sprint(i), Predicate: Predicate{Serial: fmt.Sprintf("%08x", i+1<<24)}, Time: now}
		if i == 0 {
			r.Until = &over
		}
		d.State(td).Revocations = append(d.State(td).Revocations, r)
	}
	first, err := d.Revoke(td, Revocation{Predicate: Predicate{SPIFFEID: web}, Time: now, Actor: "a"})
	if err != nil || len(d.Revocations(td)) != MaxRevocations || d.Revocations(td)[0].ID != "1" {
		t.Fatalf("what is over makes no room: %d, %v", len(d.Revocations(td)), err)
	}
	if again, err := d.Revoke(td, Revocation{Predicate: Predicate{SPIFFEID: web}, Time: now.Add(time.Second), Actor: "b"}); err != nil || again != first {
		t.Errorf("twice: %+v, %v", again, err)
	}
	if _, err := d.Revoke(td, Revocation{Predicate: Predicate{Serial: "ff"}, Time: now, Actor: "a"}); err == nil || !strings.Contains(err.Error(), "no more fit") {
		t.Errorf("one too many: %v", err)
	}
	id := must(trust.ParseID(web))
	if err := d.Restore(td, id, now); err != nil {
		t.Fatal(err)
	}
	if err := d.Restore(td, id, now); err == nil {
		t.Error("restored twice")
	}
	if r := d.Revocations(td)[MaxRevocations-1]; r.Until == nil || !r.Until.Equal(now.Add(ca.LeafTTLLimit)) {
		t.Errorf("a restored identity is remembered until %v", r.Until)
	}
	if _, err := New().Revoke(td, Revocation{Predicate: Predicate{Serial: "ff"}, Time: now, Actor: strings.Repeat("a", 300)}); err == nil {
		t.Error("an actor without end was taken")
	}
}

// TestD22RetiredIssuersKeepTheirKeyForTheirCRL, no longer than their leaves can live.
func TestD22RetiredIssuersKeepTheirKeyForTheirCRL(t *testing.T) {
	dir := t.TempDir()
	sealer := must(keys.CreateSealer(filepath.Join(dir, "key")))
	log := must(audit.Open(filepath.Join(dir, "audit.jsonl")))
	defer log.Close()
	made := must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: log, IssuerTTL: 365 * 24 * time.Hour}))
	next := must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: log}))
	d := New()
	for _, err := range []error{
		d.Add(td, KindRoot, Key{}, sealer, made.Root), d.Add(td, KindIssuer, Key{Signer: made.IssuerKey}, sealer, made.Issuer),
		d.Prepare(td, Key{Signer: next.IssuerKey}, sealer, next.Issuer), d.Prepare(td, Key{Signer: next.IssuerKey}, sealer, next.Issuer),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	states := func() (s []string) {
		for _, a := range d.State(td).Authorities {
			s = append(s, fmt.Sprintf("%s %s %v", a.Kind, a.State, a.HasKey()))
		}
		return s
	}
	if got := fmt.Sprint(states()); got != "[root active false issuer active true issuer prepared true]" {
		t.Fatal(got)
	}
	if err := d.Promote(td, "other"); err == nil {
		t.Error("promoted what is not prepared")
	}
	if err := d.Promote(td, hex.EncodeToString(next.Issuer.SubjectKeyId)); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(states()); got != "[root active false issuer retiring true issuer active true]" {
		t.Fatal(got)
	}
	signer, err := d.State(td).Authorities[2].OpenKey(t.Context(), td, sealer, nil)
	if err != nil || !trust.SameKey(signer.Public(), next.IssuerKey.Public()) {
		t.Errorf("the promoted issuer's key: %v", err)
	}
	d.DropEndedIssuers(td, time.Now().Add(ca.LeafTTLLimit-time.Hour))
	if got := fmt.Sprint(states()); got != "[root active false issuer retiring true issuer active true]" {
		t.Error(got)
	}
	d.DropEndedIssuers(td, time.Now().Add(ca.LeafTTLLimit+time.Hour))
	if got := fmt.Sprint(states()); got != "[root active false issuer retiring false issuer active true]" {
		t.Error(got)
	}
	d.DropEndedIssuers(td, time.Now().Add(366*24*time.Hour))
	if got := fmt.Sprint(states()); got != "[root active false issuer active true]" {
		t.Error(got)
	}
}
