package ca

import (
	"math"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

func TestProfileRefusesWhatItCannotMean(t *testing.T) {
	for _, tc := range []struct{ yaml, want string }{
		{"defaultTTL: 1h\nmaxTLL: 2h", `unknown field "maxTLL"`},
		{"defaultTTL: 1d", "not a duration"},
		{"defaultTTL: 1s", "below 5s"},
		{"maxTTL: 9000h", "above 2160h"},
		{"defaultTTL: 3h\nmaxTTL: 2h", "above maxTTL"},
		{"backdate: -1m", "not between"},
		{"backdate: 2h", "not between"},
		{"keyTypes: [p521]", `"p521" is not known`},
		{"keyTypes: [p256, p256]", "listed twice"},
		{"idPaths: [/chancery/server]", "reserved"},
		{"idPaths: ['/*/server']", "first segment"},
		{"idPaths: ['/ns/a*/sa']", "mixes *"},
		{"idPaths: [ns/a]", "start with a slash"},
		{"idPaths: [/ns//a]", "empty segment"},
	} {
		var c ProfileConfig
		err := yaml.UnmarshalStrict([]byte(tc.yaml), &c)
		if err == nil {
			_, err = NewProfile("workload", c)
		}
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q gave %v; want something about %q", tc.yaml, err, tc.want)
		}
	}
}

func TestProfileDefaults(t *testing.T) {
	p := profile(t, ProfileConfig{})
	if p.defaultTTL != time.Hour || p.maxTTL != 24*time.Hour || p.backdate != time.Minute || len(p.keyTypes) != 4 {
		t.Errorf("defaults are %+v", p)
	}
	if short := profile(t, ProfileConfig{MaxTTL: "10m"}); short.defaultTTL != 10*time.Minute {
		t.Errorf("with maxTTL 10m the default is %s", short.defaultTTL)
	}
	custom := profile(t, ProfileConfig{IDPaths: []string{"/region/*/app"}})
	if !matchPath(custom.paths[0], "/region/eu/app") || matchPath(custom.paths[0], "/region/eu/x/app") || matchPath(custom.paths[0], "/region/eu") {
		t.Error("patterns match by segment")
	}
}

func TestD20SecondsOverflow(t *testing.T) {
	for n, want := range map[int64]time.Duration{0: 0, -5: 0, 60: time.Minute, maxTTLSeconds: time.Duration(maxTTLSeconds) * time.Second} {
		if got, err := Seconds(n); err != nil || got != want {
			t.Errorf("Seconds(%d) = %v, %v; want %v", n, got, err, want)
		}
	}
	for _, n := range []int64{maxTTLSeconds + 1, math.MaxInt64} {
		if _, err := Seconds(n); err == nil {
			t.Errorf("Seconds(%d) gave no error", n)
		}
	}
}

func FuzzProfile(f *testing.F) {
	f.Add("defaultTTL: 1h\nmaxTTL: 24h\nkeyTypes: [p256]\nidPaths: ['/ns/*/sa/*']\nkeyEncipherment: true")
	f.Add("backdate: 1m\nidPaths: ['*']")
	f.Fuzz(func(t *testing.T, text string) {
		var c ProfileConfig
		if yaml.UnmarshalStrict([]byte(text), &c) != nil {
			return
		}
		p, err := NewProfile("fuzz", c)
		if err != nil {
			return
		}
		if p.maxTTL > LeafTTLLimit || p.defaultTTL > p.maxTTL || p.defaultTTL < MinTTL || len(p.keyTypes) == 0 || len(p.paths) == 0 {
			t.Errorf("%q was accepted as %+v", text, p)
		}
		for _, path := range p.paths {
			if path[0] == "chancery" || path[0] == "*" {
				t.Errorf("%q covers reserved paths", text)
			}
		}
	})
}
