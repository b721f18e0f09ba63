package document

import (
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// FuzzDocument: without the sealing key nothing is accepted but what was written with it. What was written with it, however
// odd, does not make us panic, and survives being written again.
func FuzzDocument(f *testing.F) {
	sealer, err := keys.CreateSealer(filepath.Join(f.TempDir(), "k"))
	if err != nil {
		f.Fatal(err)
	}
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		f.Fatal(err)
	}
	for _, text := range []string{
		`{"format":1,"version":1,"domains":{},"logs":[{"id":16777216}]}`,
		`{"format":1,"version":1,"domains":{"cluster.local":null},"logs":[{"id":16777216}]}`,
		`{"format":1,"version":1,"domains":{"cluster.local":{"generation":1,"authorities":[{"id":"ab","kind":"root","state":"active","generation":1,` +
			`"certificate":"","key":"AAAA","created":"2026-11-30T00:00:00Z"},{"id":"","kind":"issuer","state":"active","generation":1,"certificate":"x","keyRef":"file:00",` +
			`"created":"2026-11-30T00:00:00Z"}],"requested":{"id":"x","created":"2026-11-30T00:00:00Z"}}},"logs":[{"id":16777216,"key":"a+b+c"}]}`,
		`{"format":2,"version":1,"domains":{},"logs":[{"id":16777216,"replica":"a"},{"id":16777217,"replica":"b","declaredDead":"2026-11-30T00:00:00Z"}],"driver":{"replica":"a","term":1}}`,
		`{"format":3,"version":1,"domains":{"cluster.local":{"generation":1,"authorities":[{"id":"ab","kind":"root","state":"active","generation":1,"certificate":"",` +
			`"created":"2026-11-30T00:00:00Z","tainted":"2026-11-30T00:00:00Z"}],"bundleKey":{"public":"AAAA","key":"AAAA","created":"2026-11-30T00:00:00Z"},"taintedAt":1}},"logs":[{"id":16777216}]}`,
		`{"format":4}`, `{`, ``, `null`, `[]`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if _, err := Decode(raw, 1, sealer); err == nil {
			t.Fatalf("%q was accepted without an authentication code of ours", raw)
		}
		data, err := json.Marshal(envelope{raw, sealer.MAC(raw)})
		if err != nil {
			return // not JSON
		}
		var e envelope
		if json.Unmarshal(data, &e) != nil {
			t.Fatalf("%q", data)
		}
		e.MAC = sealer.MAC(e.Document) // Marshal has written it without spaces
		if data, err = json.Marshal(e); err != nil {
			t.Fatal(err)
		}
		d, err := Decode(data, 1, sealer)
		if err != nil {
			return
		}
		use(t, d, td, sealer)
		again, err := d.Encode(sealer)
		if err != nil {
			t.Fatalf("%q does not encode: %v", raw, err)
		}
		if _, err := Decode(again, 1, sealer); err != nil {
			t.Errorf("%q does not survive being written: %v", raw, err)
		}
	})
}

// use calls what reads a document.
func use(t *testing.T, d *Document, td trust.Domain, sealer *keys.Sealer) {
	if err := d.Register("a", LogState{ID: 1, Key: "a"}); err == nil && d.Own("a", "a").Check(LogState{ID: 1, Key: "a"}) != nil {
		t.Error("a replica was registered with another log")
	}
	if _, err := d.Reissue(1); err != nil && d.Version < 1<<61 {
		t.Error(err)
	}
	if b, err := d.Bundle(td); err == nil && len(b.Roots()) == 0 {
		t.Error("a bundle without roots")
	}
	for ref := range d.KeyRefs() {
		if ref == "" {
			t.Error("an empty reference")
		}
	}
	for _, kind := range []AuthorityKind{KindRoot, KindIssuer} {
		a, err := d.Active(td, kind)
		if err != nil {
			continue
		}
		_, _ = a.Certificates()
		if _, err := a.OpenKey(t.Context(), td, sealer, nil); err == nil {
			t.Error("a key that was never sealed opens")
		}
	}
	_ = d.State(td).PublicBundleKey()
	d.NoteTaints(New())
	_ = d.TaintedAt(td)
	_ = d.Prepared(td)
	for _, r := range d.Revocations(td) {
		_ = r.Predicate.String()
	}
	if _, err := d.Next(nil); err != nil {
		t.Error(err)
	}
}
