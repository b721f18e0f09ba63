package audit_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/audit"
)

// FuzzRecord: whatever strangers put into names, a record is one line of JSON, and says what encoding/json would make of it.
func FuzzRecord(f *testing.F) {
	f.Add("spiffe://td/a", "pod-1", "detail")
	f.Add("\"\\\x00\x1f\x7f", "<script>&", "\xff\xfe\u2028\r\n")
	f.Add("", `","event":"issued","serial":"00`, "é")
	f.Fuzz(func(t *testing.T, id, pod, detail string) {
		r := audit.Record{Event: audit.Denied, SPIFFEID: id, Detail: detail, Requester: audit.Requester{Pod: pod, CredentialID: id, User: detail}}
		line := r.AppendJSON(nil)
		if strings.ContainsAny(string(line), "\n\r\x00") {
			t.Fatalf("more than one line: %q", line)
		}
		want, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var got, expected audit.Record
		if err := json.Unmarshal(line, &got); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		if err := json.Unmarshal(want, &expected); err != nil {
			t.Fatal(err)
		}
		if got.SPIFFEID != expected.SPIFFEID || got.Detail != expected.Detail || got.Requester != expected.Requester || got.Event != audit.Denied || got.Serial != "" {
			t.Errorf("got %+v, want %+v", got, expected)
		}
	})
}
