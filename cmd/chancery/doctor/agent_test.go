package doctor

import (
	"encoding/base64"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/cmd/chancery/agent"
	"github.com/chancery-project/chancery/trust"
)

// jwt has the shape of a token with these claims; nobody verifies it here.
func jwt(claims string) string {
	b64 := base64.RawURLEncoding.EncodeToString
	return b64([]byte(`{"alg":"ES256"}`)) + "." + b64([]byte(claims)) + "." + b64([]byte("signature-of-the-token"))
}

func ids(all []checkup.Finding) []string {
	out := []string{}
	for _, f := range all {
		out = append(out, string(f.Severity)+" "+f.ID)
	}
	return out
}

func TestToken(t *testing.T) {
	id, err := trust.ParseID("spiffe://cluster.local/ns/foo/sa/web")
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_000_000, 0)
	const good = `"sub":"system:serviceaccount:foo:web"`
	for claims, want := range map[string][]string{
		`{` + good + `,"aud":["istio-ca"],"iat":999000,"exp":1003600}`:                            {},
		`{` + good + `,"aud":"istio-ca"}`:                                                         {}, // one that does not end
		`{` + good + `,"iat":996760,"exp":1000360}`:                                               {}, // a tenth left
		`{` + good + `,"iat":996700,"exp":1000300}`:                                               {"warning token.ending"},
		`{` + good + `,"iat":996400,"exp":1000000}`:                                               {"critical token.ending"},
		`{"sub":"system:serviceaccount:foo:api","exp":1003600}`:                                   {"warning token.other-account"},
		`{"sub":"system:serviceaccount:istio-system:ztunnel","iat":1,"exp":2}`:                    {"critical token.ending", "warning token.other-account"},
		`{` + good + `,"aud":["a","b"],"iat":999000.5,"exp":1003600.5,"kubernetes.io":{"pod":1}}`: {},
	} {
		c, err := claimsOf(jwt(claims))
		if err != nil {
			t.Errorf("%s: %v", claims, err)
			continue
		}
		if got := ids(judgeToken("token", c, id, now)); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", claims, got, want)
		}
	}
	for _, bad := range []string{"", "hello", "a.b.c", jwt("[]"), jwt(`{"aud":{"x":1}}`), jwt(`{"exp":"soon"}`)} {
		if _, err := claimsOf(bad); err == nil || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestSVID(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		life, left time.Duration
		want       []string
	}{
		{time.Hour, 30 * time.Minute, []string{}},
		{time.Hour, 24 * time.Minute, []string{}}, // the latest that it is renewed
		{time.Hour, 19 * time.Minute, []string{"warning svid.ending"}},
		{time.Hour, 5 * time.Minute, []string{"critical svid.ending"}},
		{time.Hour, -time.Second, []string{"critical svid.ending"}},
		{20 * time.Second, 8 * time.Second, []string{}}, // the minute of backdating is no life
		{20 * time.Second, 6 * time.Second, []string{"warning svid.ending"}},
	} {
		end := now.Add(c.left)
		if got := ids(judgeSVID("spiffe://a/b", end.Add(-c.life-time.Minute), end, now)); !slices.Equal(got, c.want) {
			t.Errorf("%s of %s left: %v, want %v", c.left, c.life, got, c.want)
		}
	}
}

// TestAgentWithoutAnything: each thing that an agent needs and that is not there is found.
func TestAgentWithoutAnything(t *testing.T) {
	p := newPlace(t, config) // for real roots
	p.write("agent.yaml", `
server: 127.0.0.1:1
serverRoots: state/roots.pem
tokenFile: token
identity: spiffe://cluster.local/ns/foo/sa/web
socket: socket/agent.sock
files: [nowhere]
`, 0o600)
	p.must(os.Mkdir(p.path("socket"), 0o700))
	look := func(offline bool) []string {
		t.Helper()
		s, err := agent.Load(p.path("agent.yaml"))
		p.must(err)
		r := examineAgent(t.Context(), s, offline)
		for _, f := range r.Findings {
			if strings.Contains(f.Problem, "signature-of-the-token") {
				t.Errorf("a finding quotes the token: %+v", f)
			}
		}
		return ids(r.Findings)
	}
	want := func(step string, got []string, want ...string) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", step, got, want)
		}
	}
	want("nothing there", look(false), "critical token.unusable", "critical server.unreachable", "critical agent.down", "warning file.unreadable")
	p.must(os.Mkdir(p.path("nowhere"), 0o700))
	l, err := net.Listen("tcp", "127.0.0.1:0") // no server of ours
	p.must(err)
	defer l.Close()
	go func() {
		for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
			conn.Close()
		}
	}()
	single, err := os.ReadFile(p.path("agent.yaml"))
	p.must(err)
	p.write("agent.yaml", strings.Replace(string(single), "server: 127.0.0.1:1", "servers: [127.0.0.1:1, "+l.Addr().String()+"]", 1), 0o600)
	want("one of two servers answers, but is none", look(true), "critical token.unusable", "critical server.unverified", "warning server.unreachable")
	p.write("agent.yaml", string(single), 0o600)
	p.write("token", jwt(`{"sub":"system:serviceaccount:foo:web","exp":99999999999}`)+"\n", 0o600)
	want("a token", look(true), "critical server.unreachable")
	p.must(os.Chmod(p.path("socket"), 0o777))
	want("a folder for everybody", look(true), "critical server.unreachable", "warning folder.writable")
	p.write("state/roots.pem", "hello", 0o644)
	want("no roots", look(true), "critical roots.unusable", "warning folder.writable")
	p.write("token", "hello", 0o600)
	want("no token", look(true), "critical token.unusable", "critical roots.unusable", "warning folder.writable")
}

// TestWhoseConfig: fields that only one of both has tell them apart.
func TestWhoseConfig(t *testing.T) {
	for text, want := range map[string]bool{
		config: false, "tokenFile: a": true, "server: a\nserverRoots: b\n": true, "identity: x": true, "": false, "a: [": false, "- a": false,
	} {
		if got := isAgents([]byte(text)); got != want {
			t.Errorf("%q is taken for an agent's: %v", text, got)
		}
	}
}
