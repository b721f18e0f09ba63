package server

import (
	"fmt"
	"strings"
	"testing"
)

// TestD15ServerNames: the server's certificate names what clients reach it by; default the host of listen, and localhost.
func TestD15ServerNames(t *testing.T) {
	for _, c := range []struct{ listen, names, want string }{
		{"127.0.0.1:8443", "", "[localhost] [127.0.0.1]"},
		{"[::1]:8443", "", "[localhost] [::1]"},
		{"chancery.example:8443", "", "[localhost chancery.example] []"},
		{"localhost:8443", "", "[localhost] []"},
		{":8443", "", "[localhost] []"},
		{"0.0.0.0:8443", "", "[localhost] []"},
		{"[::]:8443", "", "[localhost] []"},
		{"127.0.0.1:8443", "a.example, 10.0.0.1, a.example", "[a.example] [10.0.0.1]"},
		{"127.0.0.1:8443", "'::ffff:10.0.0.1'", "[] [10.0.0.1]"},
		{"127.0.0.1:8443", "istiod.istio-system.svc", "[istiod.istio-system.svc] []"},
		{"127.0.0.1:8443", "'*.example'", "serverNames[0]"},
		{"127.0.0.1:8443", "a, ''", "serverNames[1]"},
		{"127.0.0.1:8443", "'::'", "serverNames[0]"},
		{"127.0.0.1:8443", "'fe80::1%eth0'", "serverNames[0]"},
		{"127.0.0.1:8443", "'https://a.example'", "serverNames[0]"},
		{"127.0.0.1:8443", strings.Repeat("a", 64), "serverNames[0]"},
	} {
		text := fmt.Sprintf("listen: '%s'\nserverNames: [%s]\n%s", c.listen, c.names, minimal)
		s, err := parseConfig([]byte(text), "/c/server.yaml")
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprint(s.dns, s.ips)
		}
		if err == nil && got != c.want || err != nil && !strings.Contains(got, c.want) {
			t.Errorf("listen %s, names %s: got %s, want %s", c.listen, c.names, got, c.want)
		}
	}
}
