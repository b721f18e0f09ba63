package connections

import (
	"strings"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for _, tc := range []struct {
		in    Config
		want  Times
		error string
	}{
		{Config{}, Times{}, ""},
		{Config{"1m", "5m"}, Times{time.Minute, 5 * time.Minute}, ""},
		{Config{MaxAge: "59s"}, Times{}, "connections.maxAge: 59s should be from 1m0s to 24h0m0s"},
		{Config{MaxAge: "25h"}, Times{}, "should be from"},
		{Config{MaxAge: "long"}, Times{}, "connections.maxAge: \"long\" is not a duration"},
		{Config{DrainDelay: "6m"}, Times{}, "connections.drainDelay: 6m0s should be at most 5m0s"},
		{Config{DrainDelay: "-1s"}, Times{}, "connections.drainDelay: -1s is negative"},
	} {
		got, err := Parse(tc.in)
		if (err == nil) != (tc.error == "") || err != nil && !strings.Contains(err.Error(), tc.error) || err == nil && got != tc.want {
			t.Errorf("%+v: got %+v and %v, want %+v and %q", tc.in, got, err, tc.want, tc.error)
		}
	}
}
