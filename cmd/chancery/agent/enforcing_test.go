package agent

import (
	"strings"
	"testing"

	"github.com/chancery-project/chancery/sds"
)

// What takes no notice of CRLs is named, so that whoever revokes knows.
func TestD23NotEnforcing(t *testing.T) {
	const svid, id = "default", "spiffe://cluster.local/ns/foo/sa/web"
	stream := func(pid int32, node string, names ...string) sds.StreamStatus {
		st := sds.StreamStatus{API: sds.APIStateOfTheWorld, Peer: sds.Peer{PID: pid}, Node: node}
		for _, n := range names {
			st.Resources = append(st.Resources, sds.ResourceStatus{Name: n, Unknown: n == "unknown"})
		}
		return st
	}
	workload := func(api string) sds.StreamStatus { return sds.StreamStatus{API: api} }
	const all, elsewhere, api = " subscriptions of ALL", " proxies with an SVID from here", " streams of the Workload API"
	for _, tc := range []struct {
		name    string
		streams []sds.StreamStatus
		want    []string // how each line begins
	}{
		{"nobody", nil, nil},
		{"SVID and roots on streams of their own", []sds.StreamStatus{stream(1, "a", svid), stream(1, "a", "ROOTCA")}, nil},
		{"by service", []sds.StreamStatus{stream(1, "a", id, "service:foo/api")}, nil},
		{"by domain", []sds.StreamStatus{stream(1, "a", id, "spiffe://cluster.local")}, nil},
		{"roots alone", []sds.StreamStatus{stream(1, "a", "ROOTCA")}, nil},
		{"nothing that there is", []sds.StreamStatus{stream(1, "a", "unknown")}, nil},
		{"SVID alone", []sds.StreamStatus{stream(1, "a", svid)}, []string{"1" + elsewhere}},
		{"roots from files", []sds.StreamStatus{stream(1, "a", id, "file-root:/etc/ca.pem")}, []string{"1" + elsewhere}},
		{"two proxies of one process number", []sds.StreamStatus{stream(0, "a", svid), stream(0, "b", svid)}, []string{"2" + elsewhere}},
		{"ALL", []sds.StreamStatus{stream(1, "a", svid, "ALL"), stream(2, "b", svid), stream(2, "b", "ALL")}, []string{"2" + all}},
		{"ALL beside ROOTCA", []sds.StreamStatus{stream(1, "a", svid, "ALL", "ROOTCA")}, []string{"1" + all}},
		{"everything", []sds.StreamStatus{
			stream(1, "a", "ALL"), stream(2, "b", svid), workload(sds.APIX509SVID), workload(sds.APIX509Bundles),
		}, []string{"1" + all, "1" + elsewhere, "2" + api}},
	} {
		got := NotEnforcing(tc.streams)
		if len(got) != len(tc.want) {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
			continue
		}
		for i := range got {
			if !strings.HasPrefix(got[i], tc.want[i]) || len(got[i]) > 200 { // the server reads no more
				t.Errorf("%s: got %q, want %q", tc.name, got[i], tc.want[i])
			}
		}
	}
}
