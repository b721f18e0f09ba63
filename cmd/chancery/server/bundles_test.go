package server

import (
	"bytes"
	"crypto/tls"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/cmd/chancery/server/answering"
	printed "github.com/chancery-project/chancery/cmd/chancery/server/show"
	"github.com/chancery-project/chancery/trust"
)

// TestD6ServerTellsAnybodyOfItsRoots, who need not be able to verify it: signed by the key that status and `authority show` print. A
// taint shows in both.
func TestD6ServerTellsAnybodyOfItsRoots(t *testing.T) {
	srv, stop := started(t, "")
	defer stop()
	conn, err := grpc.NewClient(srv.listener.Addr().String(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	m, err := chanceryv1.NewIssuanceClient(conn).GetBundle(t.Context(), &chanceryv1.GetBundleRequest{})
	if err != nil {
		t.Fatal(err)
	}
	public := srv.authority.Document().State(srv.settings.domain).PublicBundleKey()
	if err := (trust.SignedBundle{Bundle: m.GetBundle(), Signature: m.GetSignature(), Key: m.GetKey()}).Verify(public); err != nil {
		t.Error(err)
	}
	b := new(chanceryv1.Bundle)
	if err := proto.Unmarshal(m.GetBundle(), b); err != nil || b.GetGeneration() != 1 || len(b.GetRoots()) != 1 {
		t.Errorf("got %v, %v", b, err)
	}
	at := time.Now().UTC().Truncate(time.Second)
	var root string
	if err := srv.authority.Change(t.Context(), func(next *authority.Document) error {
		active, err := next.Active(srv.settings.domain, authority.KindRoot)
		if err == nil {
			root, active.Tainted = active.ID, &at
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	status, err := srv.report.Status("unix:test")
	if err != nil {
		t.Fatal(err)
	}
	if d := status.GetDocument(); !bytes.Equal(d.GetBundleKey(), public) || d.GetBundleKeyError() != "" {
		t.Errorf("status says %x, %q of the bundle key", d.GetBundleKey(), d.GetBundleKeyError())
	}
	for _, c := range status.GetCertificates() {
		if tainted := c.GetTainted() != nil; tainted != (c.GetKind() == "root") || tainted && !c.GetTainted().AsTime().Equal(at) {
			t.Errorf("%s: tainted %v", c.GetKind(), c.GetTainted())
		}
	}
	resp, err := answering.Describe(srv.authority.Document())
	if err != nil {
		t.Fatal(err)
	}
	for format, want := range map[string][]string{
		"text": {"\n  bundle key " + trust.KeyFingerprint(public) + "\n", root, "TAINTED since " + at.Format(time.RFC3339) + "\n"},
		"json": {`"bundleKey": "` + trust.KeyFingerprint(public) + `"`, `"tainted": "` + at.Format(time.RFC3339) + `"`},
		"pem":  {"BEGIN CERTIFICATE"},
	} {
		var out bytes.Buffer
		if err := printed.Print(&out, format, resp); err != nil {
			t.Fatal(err)
		}
		for _, w := range want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("%s lacks %q:\n%s", format, w, out.String())
			}
		}
		if n := strings.Count(strings.ToLower(out.String()), "tainted"); format != "pem" && n != 1 {
			t.Errorf("%s says it %d times", format, n)
		}
	}
}
