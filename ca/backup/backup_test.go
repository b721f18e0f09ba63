package backup

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
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

func sealer(t testing.TB) *keys.Sealer {
	t.Helper()
	return must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
}

// stored is a document with a key that lies elsewhere, in its stored form.
func stored(s *keys.Sealer) []byte {
	d := document.New()
	d.Version = 5
	d.State(td).Authorities = []document.Authority{{ID: "ab", Kind: document.KindRoot, State: document.StateActive, KeyRef: "file:0102"}}
	return must(d.Encode(s))
}

// TestExportComesBack: what a file holds is what went in, and it says what it lacks.
func TestExportComesBack(t *testing.T) {
	s := sealer(t)
	data := stored(s)
	now := time.Date(2026, 11, 30, 12, 0, 0, 5, time.UTC)
	text, made, err := Make(data, 5, s, "ca-1", FromStore, now)
	if err != nil {
		t.Fatal(err)
	}
	got, doc, err := Open(text, s)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Document, data) || doc.Version != 5 || got.Version != 5 || got.Replica != "ca-1" || got.Source != FromStore ||
		!got.Time.Equal(now.Truncate(time.Second)) || !slices.Equal(got.TrustDomains, []string{"cluster.local"}) ||
		!slices.Equal(got.KeyRefs, []string{"file:0102"}) || len(got.NotIncluded) < 4 || got.SealingKey != made.SealingKey {
		t.Errorf("%+v", got)
	}
	if err := got.CheckDomain(doc, must(trust.ParseDomain("cluster.local"))); err != nil {
		t.Error(err)
	}
	if err := got.CheckDomain(doc, must(trust.ParseDomain("other.example"))); err == nil || !strings.Contains(err.Error(), "it is of trust domain cluster.local, and the config is of other.example") {
		t.Error(err)
	}
	if _, _, err := Make(data, 6, s, "ca-1", FromStore, now); err == nil {
		t.Error("a document of another version than the store's was exported")
	}
}

// TestD9ExportIsAuthenticated: every byte of an export counts, and its words say what is wrong.
func TestD9ExportIsAuthenticated(t *testing.T) {
	s := sealer(t)
	text, _, err := Make(stored(s), 5, s, "ca-1", FromStore, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	replace := func(old, new string) []byte {
		if !bytes.Contains(text, []byte(old)) {
			t.Fatalf("there is no %s", old)
		}
		return bytes.Replace(text, []byte(old), []byte(new), 1)
	}
	enclose := func(raw string) []byte {
		return must(json.Marshal(file{json.RawMessage(raw), s.MAC(bound([]byte(raw)))}))
	}
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"nothing":              {nil, "it is no export: EOF"},
		"another file":         {[]byte("trustDomain: a.b\n"), "it is no export"},
		"cut off":              {text[:len(text)/2], "it is no export: unexpected EOF"},
		"twice":                {append(slices.Clone(text), text...), "more than one"},
		"a brace too many":     {append(slices.Clone(text), "}\n"...), "more than one"},
		"a bracket after it":   {append(slices.Clone(text), ']'), "more than one"},
		"another kind":         {replace(`"kind": "chancery`, `"kind": "something`), "its kind is"},
		"another replica":      {replace(`"ca-1"`, `"ca-2"`), "it was changed"},
		"another version":      {replace(`"version": 5`, `"version": 6`), "it was changed"},
		"another trust domain": {replace(`cluster.local`, `evil.local`), "it was changed"},
		"another field":        {replace(`"export": {`, `"more": 1, "export": {`), "unknown field"},
		"a newer format":       {enclose(`{"kind":"chancery state export","format":2,"more":1}`), "format 2; this binary knows up to 1: use a newer one"},
		"an unknown field":     {enclose(`{"kind":"chancery state export","format":1,"more":1}`), "unknown field"},
		"no document":          {enclose(`{"kind":"chancery state export","format":1}`), "the document in it"},
		"too much":             {make([]byte, MaxFile+1), "more than"},
	} {
		if _, _, err := Open(c.data, s); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
	if _, _, err := Open(text, sealer(t)); err == nil || !strings.Contains(err.Error(), "was made with the sealing key of ID") || !strings.Contains(err.Error(), "state.sealingKey") {
		t.Errorf("with another sealing key: %v", err)
	}
	for i := 0; i < len(text); i += 7 {
		changed := slices.Clone(text)
		changed[i] ^= 1
		if _, doc, err := Open(changed, s); err == nil && !bytes.Equal(compact(changed), compact(text)) {
			t.Errorf("with another byte %d it is accepted, as %+v", i, doc)
		}
	}
}

func compact(data []byte) []byte {
	var b bytes.Buffer
	if json.Compact(&b, data) != nil {
		return data
	}
	return b.Bytes()
}

// FuzzExport: without the sealing key nothing is accepted, and what was authenticated makes nobody panic.
func FuzzExport(f *testing.F) {
	s := sealer(f)
	text, _, err := Make(stored(s), 5, s, "ca-1", FromStore, time.Now())
	if err != nil {
		f.Fatal(err)
	}
	var whole file
	if err := json.Unmarshal(text, &whole); err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(whole.Export))
	f.Add([]byte(`{"kind":"chancery state export","format":1,"document":"e30="}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if _, _, err := Open(raw, s); err == nil {
			t.Fatalf("%q was accepted without an authentication code of ours", raw)
		}
		data, err := json.Marshal(file{raw, s.MAC(bound(compact(raw)))})
		if err != nil {
			return // not JSON
		}
		e, doc, err := Open(data, s)
		if err == nil && (doc == nil || e.Version != doc.Version || e.Kind != kind) {
			t.Errorf("%q gives %+v", raw, e)
		}
	})
}
