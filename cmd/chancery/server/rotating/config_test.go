package rotating

import (
	"strings"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for _, tc := range []struct {
		in        Config
		elsewhere bool
		want      Times
		error     string
	}{
		{in: Config{}},
		{in: Config{}, elsewhere: true},
		{in: Config{"4h", "0s"}, want: Times{RootMaxAge: 4 * time.Hour}},
		{in: Config{"500h", "168h"}, error: "rotation.rootMaxAge: 500h0m0s is below 676h0m0s"},
		{in: Config{"", "168h"}, elsewhere: true, want: Times{Readers: 168 * time.Hour}},
		{in: Config{"3h", ""}, error: "rotation.rootMaxAge: 3h0m0s is below 4h0m0s"},
		{in: Config{"43800h", ""}, want: Times{RootMaxAge: 43800 * time.Hour}},
		{in: Config{"43801h", ""}, error: "rotation.rootMaxAge: 43801h0m0s is above 43800h0m0s"},
		{in: Config{"4h", ""}, elsewhere: true, error: "the root is kept elsewhere"},
		{in: Config{"", "169h"}, error: "rotation.readers: 169h0m0s is above 168h0m0s"},
		{in: Config{"5y", ""}, error: `rotation.rootMaxAge: "5y" is not a duration`},
		{in: Config{"", "-1s"}, error: "rotation.readers: -1s is negative"},
	} {
		got, err := Parse(tc.in, time.Hour, 87600*time.Hour, tc.elsewhere)
		if (err == nil) != (tc.error == "") || err != nil && !strings.Contains(err.Error(), tc.error) || err == nil && got != tc.want {
			t.Errorf("%+v: got %+v and %v, want %+v and %q", tc.in, got, err, tc.want, tc.error)
		}
	}
}

// TestD3ReadersAtLeast: a bundle endpoint's readers get their time whatever the field says, and more if it says so.
func TestD3ReadersAtLeast(t *testing.T) {
	for readers, want := range map[string]string{"": "25m0s", "0s": "25m0s", "24m": "25m0s", "26m": "26m", "x": "x", "-1s": "-1s"} {
		if got := (Config{Readers: readers}).AtLeast(25 * time.Minute).Readers; got != want {
			t.Errorf("%q: %s, want %s", readers, got, want)
		}
	}
	if got := (Config{}).AtLeast(0).Readers; got != "" {
		t.Errorf("without an endpoint: %q", got)
	}
}
