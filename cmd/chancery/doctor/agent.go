package doctor

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spiffe/go-spiffe/v2/workloadapi"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/cmd/chancery/agent"
	"github.com/chancery-project/chancery/cmd/chancery/status"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/csr/client/servers"
	"github.com/chancery-project/chancery/csr/client/source"
	"github.com/chancery-project/chancery/trust"
)

// agentTimeout bounds each call to server or agent.
const agentTimeout = 5 * time.Second

// agentFacts are what `doctor -o json` of an agent says beside the findings.
type agentFacts struct {
	Identity string      `json:"identity"`
	Server   string      `json:"server"`
	Token    *tokenFacts `json:"token,omitempty"`
	SVIDs    []svidFacts `json:"svids"`
}

type tokenFacts struct {
	Issuer    string     `json:"issuer"`
	Subject   string     `json:"subject"`
	Audiences []string   `json:"audiences"`
	Expires   *time.Time `json:"expires,omitempty"`
}

type svidFacts struct {
	ID          string    `json:"id"`
	NotAfter    time.Time `json:"notAfter"`
	SecondsLeft int64     `json:"secondsLeft"`
}

// agentExam is one look at an agent.
type agentExam struct {
	exam
	agent *agent.Settings
	id    trust.ID
	kept  *trust.Bundle // the newest one that the agent has; nil for none
	facts agentFacts
}

// examineAgent goes through all checks of an agent.
func examineAgent(ctx context.Context, s *agent.Settings, offline bool) *status.Report {
	e := &agentExam{exam: exam{offline: offline, now: time.Now()}, agent: s, facts: agentFacts{Identity: s.Identity, Server: strings.Join(s.Addresses(), ","), SVIDs: []svidFacts{}}}
	var err error
	if e.id, err = trust.ParseID(s.Identity); err != nil { // the config was checked
		e.unchecked("identity", err)
	}
	for _, check := range []struct {
		name string
		run  func(context.Context)
	}{{"token", e.checkToken}, {"server", e.checkServer}, {"socket and identity", e.checkSocket}, {"files", e.checkAgentFiles}} {
		check.run(ctx)
		e.checked = append(e.checked, check.name)
	}
	r := status.NewReport(e.findings)
	r.Agent, r.Checked = e.facts, e.checked
	return r
}

// claims are what is read of a token, without verifying anything: only the server's verdict counts.
type claims struct {
	Issuer   string   `json:"iss"`
	Subject  string   `json:"sub"`
	Audience audience `json:"aud"`
	Expires  float64  `json:"exp"`
	Issued   float64  `json:"iat"`
}

// audience is one string or a list.
type audience []string

// UnmarshalJSON implements json.Unmarshaler.
func (a *audience) UnmarshalJSON(data []byte) error {
	var one string
	if json.Unmarshal(data, &one) == nil {
		*a = audience{one}
		return nil
	}
	return json.Unmarshal(data, (*[]string)(a))
}

// claimsOf reads a token. Its error never quotes it.
func claimsOf(token string) (*claims, error) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return nil, errors.New("it is not a token (three parts with dots in between)")
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	c := new(claims)
	if err != nil || json.Unmarshal(payload, c) != nil {
		return nil, errors.New("it is not a token (its claims do not parse)")
	}
	return c, nil
}

func (e *agentExam) checkToken(ctx context.Context) {
	subject := "token " + e.agent.TokenFile
	token, err := source.TokenFile(e.agent.TokenFile)(ctx)
	if errors.Is(err, fs.ErrPermission) {
		e.unchecked(subject, err)
		return
	}
	var c *claims
	if err == nil {
		c, err = claimsOf(token)
	}
	if err != nil {
		e.found("token.unusable", checkup.Critical, subject, "cannot be used: %v", err)
		return
	}
	e.facts.Token = &tokenFacts{Issuer: c.Issuer, Subject: c.Subject, Audiences: c.Audience}
	e.findings = append(e.findings, judgeToken(subject, c, e.id, e.now)...)
	if c.Expires > 0 {
		t := time.Unix(int64(c.Expires), 0).UTC()
		e.facts.Token.Expires = &t
	}
}

func judgeToken(subject string, c *claims, id trust.ID, now time.Time) (all []checkup.Finding) {
	if c.Expires > 0 {
		end := time.Unix(int64(c.Expires), 0)
		left := end.Sub(now)
		switch {
		case left <= 0:
			all = append(all, checkup.Found("token.ending", checkup.Critical, subject, "ended %s ago", checkup.Span(-left)))
		case c.Issued > 0 && left.Seconds() < (c.Expires-c.Issued)/10:
			all = append(all, checkup.Found("token.ending", checkup.Warning, subject, "ends in %s", checkup.Span(left)))
		}
	}
	if ns, account, ok := id.Workload(); ok {
		if want := "system:serviceaccount:" + ns + ":" + account; c.Subject != want {
			all = append(all, checkup.Found("token.other-account", checkup.Warning, subject, "is of %s, and identity %s of %s", c.Subject, id, want))
		}
	}
	return all
}

// checkServer looks whether the servers prove to be those that the agent would talk to. One of several that cannot be reached
// is a warning: the agent asks another.
func (e *agentExam) checkServer(ctx context.Context) {
	roots, err := source.RootsFile(e.agent.ServerRoots)()
	subject := "roots " + e.agent.ServerRoots
	if errors.Is(err, fs.ErrPermission) {
		e.unchecked(subject, err)
		return
	}
	var bundle *trust.Bundle
	if err == nil {
		bundle, err = trust.NewBundle(e.id.Domain(), 0, roots)
	}
	if err != nil {
		e.found("roots.unusable", checkup.Critical, subject, "cannot be used: %v", err)
		return
	}
	// What the agent has learned since counts beside the file, as it does for the agent: other roots, and other trust domains of a migration.
	if kept, err := anchor.Open(anchor.Config{File: e.agent.Bundle, Domain: e.id.Domain()}); err == nil {
		e.kept = kept.Bundle()
	}
	unreachable := map[string]string{} // by address, why
	all := e.agent.Addresses()
	for _, addr := range all {
		if why := e.tryServer(ctx, addr, bundle); why != "" {
			unreachable[addr] = why
		}
	}
	for _, addr := range all {
		switch why := unreachable[addr]; {
		case why == "":
		case len(unreachable) < len(all):
			e.found("server.unreachable", checkup.Warning, "server "+addr, "%s; the agent asks another one", why)
		default:
			e.found("server.unreachable", checkup.Critical, "server "+addr, "%s", why)
		}
	}
}

// tryServer connects to one server. It returns why that cannot be reached, and notes what else is wrong with it.
func (e *agentExam) tryServer(ctx context.Context, addr string, bundle *trust.Bundle) (unreachable string) {
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return fmt.Sprintf("cannot be reached: %v", err)
	}
	defer conn.Close()
	want := trust.SystemID(e.id.Domain(), "server")
	config := trust.ClientTLS(want, trust.Only(bundle), func() *trust.Identity { return nil })
	config.VerifyConnection = func(cs tls.ConnectionState) error {
		if e.kept != nil && servers.Verify(cs.PeerCertificates, e.kept) == nil {
			if why := servers.VerifyAny(cs.PeerCertificates, bundle.Roots()); why != nil {
				e.found("roots.outdated", checkup.Warning, "roots "+e.agent.ServerRoots, "do not vouch for server %s: %v", addr, why)
			}
			return nil
		}
		return servers.Verify(cs.PeerCertificates, bundle)
	}
	config.NextProtos = []string{"h2"}
	switch err := tls.Client(conn, config).HandshakeContext(ctx); {
	case ctx.Err() != nil:
		return fmt.Sprintf("has not answered within %s", agentTimeout)
	case err != nil:
		e.found("server.unverified", checkup.Critical, "server "+addr, "does not prove to be %s: %v", want, err)
	}
	return ""
}

// checkSocket asks the agent, if it runs, for the identity that it gives this user.
func (e *agentExam) checkSocket(ctx context.Context) {
	if e.offline {
		return
	}
	subject := "agent on " + e.agent.Socket
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", e.agent.Socket)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED):
		e.found("agent.down", checkup.Critical, subject, "does not answer: %v", err)
		return
	case err != nil:
		e.unchecked(subject, err)
		return
	}
	conn.Close()
	got, err := workloadapi.FetchX509Context(ctx, workloadapi.WithAddr("unix://"+e.agent.Socket))
	switch {
	case grpcstatus.Code(err) == codes.PermissionDenied:
		e.unchecked(subject, fmt.Errorf("it gives user %s nothing (allowUIDs)", owner(uint32(os.Getuid()))))
		return
	case err != nil:
		e.found("agent.no-identity", checkup.Critical, subject, "gives no identity: %v", err)
		return
	}
	for _, svid := range got.SVIDs {
		leaf := svid.Certificates[0]
		e.facts.SVIDs = append(e.facts.SVIDs, svidFacts{svid.ID.String(), leaf.NotAfter.UTC(), int64(leaf.NotAfter.Sub(e.now).Seconds())})
		e.findings = append(e.findings, judgeSVID(svid.ID.String(), leaf.NotBefore, leaf.NotAfter, e.now)...)
	}
}

// judgeSVID judges the life that is left. That begins with the receipt, not with the backdated NotBefore (decision D20).
func judgeSVID(id string, notBefore, notAfter, now time.Time) []checkup.Finding {
	left, life := notAfter.Sub(now), notAfter.Sub(notBefore.Add(ca.DefaultBackdate))
	severity := checkup.OK
	switch {
	case left <= 0:
		return []checkup.Finding{checkup.Found("svid.ending", checkup.Critical, "SVID of "+id, "ended %s ago", checkup.Span(-left))}
	case left < life/10:
		severity = checkup.Critical
	case left < life/3:
		severity = checkup.Warning
	default:
		return nil
	}
	return []checkup.Finding{checkup.Found("svid.ending", severity, "SVID of "+id, "has %s of %s left", checkup.Span(left), checkup.Span(life))}
}

func (e *agentExam) checkAgentFiles(context.Context) {
	e.checkFolder(filepath.Dir(e.agent.Socket), -1)
	e.checkFile(file{what: "roots", path: e.agent.ServerRoots, most: 0o644}, -1)
	for _, dir := range e.agent.Files {
		if _, err := os.ReadDir(dir); err != nil {
			e.found("file.unreadable", checkup.Warning, "folder "+dir, "cannot be read: %v", err)
		}
	}
}
