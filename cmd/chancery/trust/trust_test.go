package trust

import (
	"bytes"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// TestFieldsAreDocumented: docs/federation.md knows every field of -o json, every subcommand and every metric.
func TestFieldsAreDocumented(t *testing.T) {
	data, err := os.ReadFile("../../../docs/federation.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(data), "\n### JSON\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, v := range []any{domainJSON{}, rootJSON{}, relationshipJSON{}} {
		for f := range reflect.TypeOf(v).Fields() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if !strings.Contains(section, "`"+name+"`") {
				t.Errorf("the section JSON lacks %s", name)
			}
		}
	}
	for _, c := range Command("").Commands() {
		if !strings.Contains(string(data), "| `chancery trust "+c.Name()) && c.Name() != "migrate" {
			t.Errorf("there is no row for chancery trust %s", c.Name())
		}
	}
	metrics, err := os.ReadFile("../server/federating/metrics.go")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for i, part := range strings.Split(string(metrics), `"`) {
		if i%2 == 1 && strings.HasPrefix(part, "chancery_") {
			n++
			if !strings.Contains(string(data), "| `"+part+"{trust_domain}` |") {
				t.Errorf("there is no row for %s", part)
			}
		}
	}
	if n < 6 {
		t.Errorf("only %d metrics were found", n)
	}
}

// TestList: a line for each domain, whatever others wrote.
func TestList(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	empty := []byte(`{"keys":[],"spiffe_sequence":3}`)
	var out bytes.Buffer
	err := printList(&out, "text", []*chanceryv1.TrustedDomain{
		{TrustDomain: "new.example", Standing: "own", Bundle: empty, Since: timestamppb.New(now.Add(-time.Hour))},
		{TrustDomain: "old.example", Standing: "former", Bundle: empty, Since: timestamppb.New(now.Add(-time.Hour))},
		{TrustDomain: "b.example", Standing: "federated", Bundle: []byte(`{"keys":[]}`), Since: timestamppb.New(now.Add(time.Minute)), Relationship: &chanceryv1.Relationship{
			Url: "https://b.example", NextTry: timestamppb.New(now.Add(90 * time.Second)), RefreshHint: durationpb.New(time.Minute),
		}},
		{TrustDomain: "c.example", Standing: "federated", Relationship: &chanceryv1.Relationship{Url: "https://c.example", Error: "it says\n\x1b[2Jthis"}},
		{TrustDomain: "d.example", Standing: "federated", Bundle: []byte(`{`), Since: timestamppb.New(now)},
	}, now)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 6 {
		t.Fatalf("%d lines:\n%s", len(lines), out.String())
	}
	for i, want := range []string{
		"TRUST DOMAIN STANDING ROOTS SEQUENCE AGE NEXT REFRESH TROUBLE",
		"new.example own 0 3 1 h 0 min - nothing of it is trusted",
		"old.example former 0 3 1 h 0 min - -",
		"b.example federated 0 - 0 s in 1 min 30 s nothing of it is trusted",
		"c.example federated 0 - - elsewhere it says; \uFFFD[2Jthis",
		"d.example federated 0 - 0 s never SPIFFE bundle of d.example: ",
	} {
		if got := strings.Join(strings.Fields(lines[i]), " "); !strings.HasPrefix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
