package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
	"github.com/chancery-project/chancery/test/process"
	"github.com/chancery-project/chancery/trust"
)

// rotationStatus is what `chancery rotate status -o json` prints, as far as tests read it.
type rotationStatus struct {
	TrustDomain string         `json:"trustDomain"`
	Version     uint64         `json:"version"`
	Rotation    *rotationJSON  `json:"rotation"`
	Past        []rotationJSON `json:"past"`
}

type rotationJSON struct {
	ID         string         `json:"id"`
	Kind       string         `json:"kind"`
	Reason     string         `json:"reason"`
	Actor      string         `json:"actor"`
	FromRoot   string         `json:"fromRoot"`
	FromIssuer string         `json:"fromIssuer"`
	ToRoot     string         `json:"toRoot"`
	ToIssuer   string         `json:"toIssuer"`
	Phase      string         `json:"phase"`
	Back       bool           `json:"rolledBack"`
	Outcome    string         `json:"outcome"`
	Trouble    string         `json:"trouble"`
	Gates      []gateJSON     `json:"gates"`
	Overrides  []overrideJSON `json:"overrides"`
}

type gateJSON struct {
	Name       string   `json:"name"`
	Passed     bool     `json:"passed"`
	Overridden bool     `json:"overridden"`
	Have       uint64   `json:"have"`
	Want       uint64   `json:"want"`
	Waiting    []string `json:"waiting"`
}

type overrideJSON struct {
	Gate    string `json:"gate"`
	Phase   string `json:"phase"`
	Because string `json:"because"`
	Actor   string `json:"actor"`
}

// gate returns one by name.
func (j *rotationJSON) gate(name string) gateJSON {
	if j != nil {
		for _, g := range j.Gates {
			if g.Name == name {
				return g
			}
		}
	}
	return gateJSON{}
}

// rotate runs `chancery rotate ARGS...` on one server.
func (r *ring) rotate(server int, args ...string) (stdout, stderr string, err error) {
	r.t.Helper()
	return r.run(server, append([]string{"rotate"}, args...)...)
}

// run runs a command about one server.
func (r *ring) run(server int, args ...string) (stdout, stderr string, err error) {
	r.t.Helper()
	return Run(r.t, "", append(slices.Clip(args), "-c", r.servers[server].Config)...)
}

// mustRotate is rotate for what should succeed.
func (r *ring) mustRotate(args ...string) {
	r.t.Helper()
	if _, stderr, err := r.rotate(r.admin, args...); err != nil {
		r.t.Fatalf("rotate %s: %v: %s", strings.Join(args, " "), err, stderr)
	}
}

// status asks one server after another, until one answers.
func (r *ring) status() (*rotationStatus, error) {
	r.t.Helper()
	var errs []error
	for i := range r.servers {
		stdout, stderr, err := r.rotate(i, "status", "-o", "json")
		if err != nil {
			errs = append(errs, fmt.Errorf("server %d: %w: %s", i, err, strings.TrimSpace(stderr)))
			continue
		}
		s := new(rotationStatus)
		if err := json.Unmarshal([]byte(stdout), s); err != nil {
			return nil, fmt.Errorf("%w: %s", err, stdout)
		}
		return s, nil
	}
	return nil, errors.Join(errs...)
}

// logStatus shows where the rotation stands, as people would see it.
func (r *ring) logStatus() {
	for i, s := range r.servers {
		// The context of the test has ended when its cleanup runs.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.t.Context()), 10*time.Second)
		out, err := command(ctx, r.t, "rotate", "status", "-c", s.Config)
		cancel()
		r.t.Logf("rotate status of server %d: %v\n%s", i, err, out)
		if err == nil {
			return
		}
	}
}

// document returns the newest that the store has.
func (r *ring) document() (*document.Document, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.t.Context()), 2*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, r.store.postgres.URL(r.store.database, pgtest.Admin))
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	var version uint64
	var data []byte
	if err := conn.QueryRow(ctx, `SELECT version, data FROM chancery.document`).Scan(&version, &data); err != nil {
		return nil, err
	}
	return document.Decode(data, version, r.sealer())
}

func (r *ring) sealer() *keys.Sealer {
	r.t.Helper()
	s, err := keys.LoadSealer(r.sealing)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// domain is the trust domain of all tests.
func domain(t testing.TB) trust.Domain {
	t.Helper()
	td, err := trust.ParseDomain(trustDomain)
	if err != nil {
		t.Fatal(err)
	}
	return td
}

// authorities is what a document says of roots and issuers.
type authorities struct {
	root, issuer string // the active ones
	roots        []string
}

func (r *ring) authorities() authorities {
	r.t.Helper()
	var a authorities
	Eventually(r.t, 30*time.Second, "the store shows the document", func() error {
		d, err := r.document()
		if err != nil {
			return err
		}
		td := domain(r.t)
		a = authorities{}
		for _, x := range d.State(td).Authorities {
			if x.Kind == document.KindRoot {
				a.roots = append(a.roots, x.ID)
			}
			if x.State == document.StateActive && x.Kind == document.KindRoot {
				a.root = x.ID
			} else if x.State == document.StateActive {
				a.issuer = x.ID
			}
		}
		slices.Sort(a.roots)
		return nil
	})
	return a
}

// rotation returns the one under way, or the last one, as the document has it. The error says that the store does not answer.
func (r *ring) rotation() (now *document.Rotation, last *document.PastRotation, err error) {
	d, err := r.document()
	if err != nil {
		return nil, nil, err
	}
	s := d.State(domain(r.t))
	if len(s.Past) > 0 {
		last = &s.Past[0]
	}
	return s.Rotation, last, nil
}

// begin starts a rotation and returns its ID.
func (r *ring) begin(args ...string) string {
	r.t.Helper()
	return r.beginBy(append([]string{"rotate", "start"}, args...)...)
}

// beginBy starts what is under way from then on by some command, and returns its ID.
func (r *ring) beginBy(args ...string) string {
	r.t.Helper()
	_, before, err := r.rotation()
	if err != nil {
		r.t.Fatal(err)
	}
	stdout, stderr, err := r.run(r.admin, append(slices.Clip(args), "-o", "json")...)
	if err != nil {
		r.t.Fatalf("%v: %v: %s", args, err, stderr)
	}
	var id string
	Eventually(r.t, 10*time.Second, "the rotation is in the document", func() error {
		now, last, err := r.rotation()
		switch {
		case err != nil:
			return err
		case now != nil:
			id = now.ID
		case last != nil && (before == nil || last.ID != before.ID):
			id = last.ID
		default:
			return errors.New("there is none")
		}
		return nil
	})
	s := new(rotationStatus)
	if err := json.Unmarshal([]byte(stdout), s); err != nil || s.Rotation == nil || s.Rotation.ID != id {
		r.t.Errorf("%v prints %v: %s; want rotation %s", args, err, stdout, id)
	}
	r.t.Logf("%s: rotation %s: %v", r.at(), id, args)
	return id
}

// errUnderWay is why a wait goes on.
var errUnderWay = errors.New("it is under way")

// until waits until cond returns nil, which is asked with the phase of the rotation, "" once it has ended. Meanwhile the killer
// kills, and each phase is logged, with what it waits for if that takes long.
func (r *ring) until(id string, limit time.Duration, what string, cond func(document.Phase) error) {
	r.t.Helper()
	var last document.Phase
	began, seen, told := time.Now(), time.Now(), time.Now()
	err := process.Poll(limit, func() (stop bool, err error) {
		r.killer.tick()
		phase, err := r.phase(id)
		if err != nil {
			return r.t.Failed(), err
		}
		if phase != last {
			r.t.Logf("%s: phase %q, %v after the one before", r.at(), phase, time.Since(seen).Round(10*time.Millisecond))
			last, seen, told = phase, time.Now(), time.Now()
			r.killer.soon()
		} else if time.Since(told) > 15*time.Second {
			r.logGates()
			told = time.Now()
		}
		if err := cond(phase); err != nil {
			wait(r.t.Context(), 80*time.Millisecond) // the machine has other things to do than to answer us
			return r.t.Failed(), fmt.Errorf("phase %q since %v, %v after the start: %w", phase, time.Since(seen).Round(time.Millisecond), time.Since(began).Round(time.Millisecond), err)
		}
		return false, nil
	})
	if err != nil {
		r.logStatus()
		r.t.Fatalf("waiting until %s: %v", what, err)
	}
}

// phase returns that of a rotation, "" once it has ended.
func (r *ring) phase(id string) (document.Phase, error) {
	now, past, err := r.rotation()
	switch {
	case err != nil:
		return "", err
	case now != nil && now.ID == id:
		return now.Phase, nil
	case past != nil && past.ID == id:
		return "", nil
	}
	return "", fmt.Errorf("the document knows no rotation %s", id)
}

// logGates shows what a rotation waits for.
func (r *ring) logGates() {
	r.t.Helper()
	s, err := r.status()
	if err != nil || s.Rotation == nil {
		r.t.Logf("%s: rotate status: %v", r.at(), err)
		return
	}
	for _, g := range s.Rotation.Gates {
		if !g.Passed {
			r.t.Logf("%s: phase %s, gate %s %d/%d: %.600q %s", r.at(), s.Rotation.Phase, g.Name, g.Have, g.Want, g.Waiting, s.Rotation.Trouble)
		}
	}
}

// ends waits for the end of a rotation, and returns it.
func (r *ring) ends(id, outcome string, limit time.Duration) *document.PastRotation {
	r.t.Helper()
	r.until(id, limit, fmt.Sprintf("rotation %s ends", id), func(p document.Phase) error {
		if p != "" {
			return errUnderWay
		}
		return nil
	})
	_, last, err := r.rotation()
	if err != nil {
		r.t.Fatal(err)
	}
	if last.Outcome != outcome {
		r.t.Errorf("the rotation ended as %q; want %q", last.Outcome, outcome)
	}
	r.t.Logf("%s: rotation %s %s after %v", r.at(), id, last.Outcome, last.Ended.Sub(last.Started).Round(10*time.Millisecond))
	return last
}

// reaches waits for a phase.
func (r *ring) reaches(id string, phase document.Phase, limit time.Duration) {
	r.t.Helper()
	r.until(id, limit, fmt.Sprintf("rotation %s is in phase %s", id, phase), func(p document.Phase) error {
		switch p {
		case phase:
			return nil
		case "":
			r.t.Fatalf("the rotation has ended before phase %s", phase)
		}
		return errUnderWay
	})
}

// hold has the store refuse documents whose rotation is in a phase, so that the one before does not end; let takes that back.
func (r *ring) hold(phase document.Phase) (let func()) {
	r.t.Helper()
	r.store.postgres.Exec(r.t, r.store.database,
		`CREATE OR REPLACE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
			IF (convert_from(NEW.data, 'UTF8')::jsonb #>> '{document,domains,`+trustDomain+`,rotation,phase}') = TG_ARGV[0] THEN
				RAISE EXCEPTION 'the test holds the rotation before phase %', TG_ARGV[0]; END IF;
			RETURN NEW; END $$`,
		`CREATE TRIGGER hold BEFORE UPDATE ON chancery.document FOR EACH ROW EXECUTE FUNCTION hold('`+string(phase)+`')`)
	return func() { r.store.postgres.Exec(r.t, r.store.database, `DROP TRIGGER hold ON chancery.document`) }
}

// stolen is the key of an issuer in the wrong hands.
type stolen struct {
	*testCA
	id string
}

// steal takes the key of the active issuer, as who has sealing key and store can.
func (r *ring) steal() stolen {
	r.t.Helper()
	d, err := r.document()
	if err != nil {
		r.t.Fatal(err)
	}
	td := domain(r.t)
	a, err := d.Active(td, document.KindIssuer)
	if err != nil {
		r.t.Fatal(err)
	}
	key, err := a.OpenKey(r.t.Context(), td, r.sealer(), nil)
	if err != nil {
		r.t.Fatal(err)
	}
	cert, err := a.X509()
	if err != nil {
		r.t.Fatal(err)
	}
	return stolen{&testCA{cert: cert, key: key}, a.ID}
}

// leaf signs a certificate that is valid for an hour.
func (s stolen) leaf(t testing.TB, id string) tls.Certificate {
	t.Helper()
	uri, err := url.Parse(id)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := sign(&x509.Certificate{
		SerialNumber: randomSerial(), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true, URIs: []*url.URL{uri},
	}, s.cert, key.Public(), s.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{cert.Raw, s.cert.Raw}, PrivateKey: key, Leaf: cert}
}

// call makes a request to an Envoy of the ring with a certificate, on a connection of its own. The server's side is not looked at.
func (n *ringNode) call(cert tls.Certificate) error {
	config := &tls.Config{InsecureSkipVerify: true, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return &cert, nil // also to one who does not ask for certificates under its root
	}}
	client := &http.Client{Timeout: loadTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&tls.Dialer{Config: config}).DialContext(ctx, "unix", n.inbound)
		},
	}}
	return get(client, "https://ring/")
}

// presents checks whether each Envoy, and go-spiffe, takes certificates of a stolen issuer.
func (r *ring) presents(s stolen, taken bool, when string) {
	r.t.Helper()
	for i, n := range r.nodes {
		left := r.nodes[(i+len(r.nodes)-1)%len(r.nodes)]
		before := n.Stats(r.t, "inbound.ssl.fail_verify_error")["listener.inbound.ssl.fail_verify_error"]
		err := n.call(s.leaf(r.t, left.id))
		if err == nil {
			n.seen.own(left.id)
		}
		after := n.Stats(r.t, "inbound.ssl.fail_verify_error")["listener.inbound.ssl.fail_verify_error"]
		switch {
		case taken && err != nil:
			r.t.Errorf("%s: %s refuses a certificate of issuer %s: %v", when, n.Name, s.id, err)
		case !taken && (err == nil || after == before):
			r.t.Errorf("%s: %s does not refuse a certificate of issuer %s: %v; %d refused before, %d after", when, n.Name, s.id, err, before, after)
		}
	}
	leaf := s.leaf(r.t, r.nodes[0].id)
	err := r.probe.trusts(r.t, r.nodes[0].id, []*x509.Certificate{leaf.Leaf, s.cert})
	if taken != (err == nil) {
		r.t.Errorf("%s: go-spiffe on a certificate of issuer %s: %v; want it taken: %v", when, s.id, err, taken)
	}
}

// holds checks which roots, by ID, consumers have, and the store.
func (r *ring) holds(roots ...string) {
	r.t.Helper()
	slices.Sort(roots)
	if have := r.authorities().roots; !slices.Equal(have, roots) {
		r.t.Errorf("the document has the roots %v; want %v", have, roots)
	}
	Eventually(r.t, r.cfg.TTL, fmt.Sprintf("everybody has %d roots", len(roots)), func() error {
		if have := r.probe.rootIDs(r.t); !slices.Equal(have, roots) {
			return fmt.Errorf("go-spiffe has %v; want %v", have, roots)
		}
		for _, n := range r.nodes {
			have := map[string]int{} // each of its contexts has them
			_, all := n.Certs(r.t)
			for _, root := range all {
				have[root.Serial]++
			}
			if len(have) != len(roots) {
				return fmt.Errorf("%s has %d roots (%v); want %d", n.Name, len(have), have, len(roots))
			}
		}
		return nil
	})
}

// command is Run under a context of its own.
func command(ctx context.Context, t testing.TB, args ...string) (string, error) {
	t.Helper()
	var out strings.Builder
	cmd := exec.CommandContext(ctx, ChanceryBinary(t), args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}
