package naming

import (
	"bytes"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

func page(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile("../../../docs/naming.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestCommandsOfTheDocs: each `chancery naming ...` that docs/naming.md shows is one that there is, with flags that it has.
func TestCommandsOfTheDocs(t *testing.T) {
	seen := map[string]bool{}
	for _, line := range regexp.MustCompile("chancery (naming [^`#\n]*)").FindAllStringSubmatch(page(t), -1) {
		words := strings.Fields(line[1])[1:]
		cmd, rest, err := Command().Find(words)
		if err != nil || cmd.Name() != words[0] {
			t.Errorf("%s: %v", line[0], err)
			continue
		}
		seen[cmd.Name()] = true
		if err := cmd.ParseFlags(rest); err != nil {
			t.Errorf("%s: %v", line[0], err)
		}
	}
	for _, cmd := range Command().Commands() {
		if !seen[cmd.Name()] {
			t.Errorf("docs/naming.md does not show `chancery naming %s`", cmd.Name())
		}
	}
}

// TestFieldsAreDocumented: docs/naming.md knows every field of -o json.
func TestFieldsAreDocumented(t *testing.T) {
	_, section, _ := strings.Cut(page(t), "\n## JSON\n")
	for _, v := range []any{serviceJSON{}, identityJSON{}, listJSON{}} {
		for f := range reflect.TypeOf(v).Fields() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if !strings.Contains(section, "`"+name+"`") {
				t.Errorf("field %s of %T is not there", name, v)
			}
		}
	}
}

// TestShow: nobody, somebody, somebody who leaves, and nothing known are told apart; what objects say cannot play with a terminal.
func TestShow(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	one := func(s *chanceryv1.NamedService) *chanceryv1.ShowNamingResponse {
		return &chanceryv1.ShowNamingResponse{Services: []*chanceryv1.NamedService{s}, Trouble: []string{"cluster east: pods cannot be read"}}
	}
	full := one(&chanceryv1.NamedService{Service: "shop/web", Problems: []string{"service shop/web: \x1b[2J"}, Identities: []*chanceryv1.NamedIdentity{
		{SpiffeId: "spiffe://td/new", Because: []string{"pod a", "pod b"}, More: 3},
		{SpiffeId: "spiffe://td/old", Because: []string{"nothing"}, Until: timestamppb.New(now.Add(70 * time.Second))},
	}})
	for _, c := range []struct {
		name, format string
		why          bool
		resp         *chanceryv1.ShowNamingResponse
		want, err    string
	}{
		{"short", "text", false, full, "spiffe://td/new\nspiffe://td/old  (leaves in 1m10s: nothing names it any more)\ntrouble: cluster east: pods cannot be read\n", ""},
		{"why", "text", true, full, "spiffe://td/new\n  pod a\n  pod b\n  and 3 more\nspiffe://td/old  (leaves in 1m10s: nothing names it any more)\n  nothing\nproblem: service shop/web: \ufffd[2J\ntrouble: cluster east: pods cannot be read\n", ""},
		{"nobody", "text", true, one(&chanceryv1.NamedService{Service: "shop/web"}), "nobody may serve shop/web\ntrouble: cluster east: pods cannot be read\n", ""},
		{"unknown", "text", false, one(&chanceryv1.NamedService{Service: "shop/web", Unknown: true}), "trouble: cluster east: pods cannot be read\n", "nothing says that there is a service shop/web"},
		{"unknown, json", "json", false, one(&chanceryv1.NamedService{Service: "shop/web", Unknown: true}), `"known": false`, "nothing says"},
		{"json", "json", true, full, `"moreReasons": 3`, ""},
		{"json, short", "json", false, full, `"until": "2026-11-30T12:01:10Z"`, ""},
	} {
		var out bytes.Buffer
		err := show(&out, c.format, c.why, c.resp, now)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v", c.name, err)
		}
		if c.format == "text" && out.String() != c.want || !strings.Contains(out.String(), c.want) || !c.why && strings.Contains(out.String(), "pod a") {
			t.Errorf("%s: %q", c.name, out.String())
		}
	}
	var out bytes.Buffer
	full.Omitted = 7
	full.Services = append(full.Services, &chanceryv1.NamedService{Service: "shop/z"})
	if err := list(&out, "text", full); err != nil || out.String() != "shop/web:\n  spiffe://td/new\n  spiffe://td/old\nshop/z: nobody\nand 7 more services\ntrouble: cluster east: pods cannot be read\n" {
		t.Errorf("%v: %q", err, out.String())
	}
}
