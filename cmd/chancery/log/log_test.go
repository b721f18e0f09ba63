package log

import (
	"reflect"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/issuelog/verify"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

func TestSerialsAsToolsPrintThem(t *testing.T) {
	const want = "649858380c58759cc21c87e4893104676b308c55"
	for in, out := range map[string]string{
		want: want, "649858380C58759CC21C87E4893104676B308C55": want, "00" + want: want,
		"64:98:58:38:0C:58:75:9C:C2:1C:87:E4:89:31:04:67:6B:30:8C:55": want, "abc": "0abc",
		"": "", "xyz": "", want + want: "", `1"`: "",
	} {
		got, err := process.CleanSerial(in)
		if got != out || (err == nil) != (out != "") {
			t.Errorf("%q gave %q, %v; want %q", in, got, err, out)
		}
	}
}

func TestQueries(t *testing.T) {
	now := time.Date(2026, 11, 30, 8, 0, 0, 0, time.UTC)
	for _, tc := range []struct {
		args  []string
		since string
		want  verify.Query
		ok    bool
	}{
		{nil, "", verify.Query{}, false},
		{nil, "2h", verify.Query{Since: now.Add(-2 * time.Hour)}, true},
		{nil, "2026-11-29T00:00:00Z", verify.Query{Since: time.Date(2026, 11, 29, 0, 0, 0, 0, time.UTC)}, true},
		{nil, "-2h", verify.Query{}, false},
		{nil, "yesterday", verify.Query{}, false},
		{[]string{"spiffe://cluster.local/ns/foo/sa/web"}, "", verify.Query{SPIFFEID: "spiffe://cluster.local/ns/foo/sa/web"}, true},
		{[]string{"spiffe://"}, "", verify.Query{}, false},
		{[]string{"AB:CD"}, "1h", verify.Query{Serial: "abcd", Since: now.Add(-time.Hour)}, true},
		{[]string{"web"}, "", verify.Query{}, false},
	} {
		got, err := parseQuery(tc.args, tc.since, now)
		if (err == nil) != tc.ok || tc.ok && !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%q --since %q: %+v, %v", tc.args, tc.since, got, err)
		}
	}
}
