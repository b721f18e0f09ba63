package revoke

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

const web = "spiffe://cluster.local/ns/foo/sa/web"

// TestD13IncompleteAnswersSaySo: exit code 2, with the logs that could not be read, in both formats and both commands.
func TestD13IncompleteAnswersSaySo(t *testing.T) {
	missing := []string{"log cluster.local/chancery/log/20000000+aabbccdd+key of another replica cannot be reached from here"}
	q := &chanceryv1.RevokeRequest{Predicate: &chanceryv1.Predicate{SpiffeId: web}}
	for _, format := range []string{"text", "json"} {
		for name, print := range map[string]func(*bytes.Buffer) error{
			"revoke": func(b *bytes.Buffer) error {
				return printRevoked(b, format, q, &chanceryv1.RevokeResponse{MissingLogs: missing})
			},
			"delayed": func(b *bytes.Buffer) error {
				return printRevoked(b, format, q, &chanceryv1.RevokeResponse{Delayed: missing[0]})
			},
			"list": func(b *bytes.Buffer) error {
				return printList(b, format, &chanceryv1.ListRevocationsResponse{MissingLogs: missing})
			},
			"list delayed": func(b *bytes.Buffer) error {
				return printList(b, format, &chanceryv1.ListRevocationsResponse{Delayed: missing[0]})
			},
		} {
			var out bytes.Buffer
			err := print(&out)
			e, ok := errors.AsType[*process.ExitError](err)
			if !ok || e.Code != 2 || !strings.Contains(err.Error(), "INCOMPLETE") || !strings.Contains(err.Error(), missing[0]) || out.Len() == 0 {
				t.Errorf("%s, %s: %v after %q", name, format, err, out.String())
			}
		}
	}
}

// TestD23AnswersNameWhoDoesNotEnforce, and print what others wrote so that it cannot steer a terminal.
func TestD23AnswersNameWhoDoesNotEnforce(t *testing.T) {
	q := &chanceryv1.RevokeRequest{Predicate: &chanceryv1.Predicate{Node: "east/n1", IssuedBefore: timestamppb.New(time.Unix(0, 0))}, DryRun: true}
	r := &chanceryv1.RevokeResponse{
		Count: 1001, Agents: 3, Acknowledged: 2, NotEnforcing: []string{"agent a at b: ALL\x1b[2J ignores CRLs"},
		Certificates: []*chanceryv1.RevokedCertificate{{Serial: "abcd", SpiffeId: web, Node: "east/n1", NotAfter: timestamppb.New(time.Unix(60, 0))}},
	}
	var out bytes.Buffer
	if err := printRevoked(&out, "text", q, r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"DRY RUN: nothing is changed. Revoking node east/n1, issued before 1970-01-01T00:00:00Z would mean 1001 certificates.",
		"  abcd  " + web + "  node east/n1  until 1970-01-01T00:01:00Z\n", "  and 1000 more\n", "Agents: 3 connected to this server, 2 of them have the last CRLs.",
		"Not enforced by:\n  - agent a at b: ALL\uFFFD[2J ignores CRLs\n", "Connections that stand go on until their next handshake.",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
	out.Reset()
	if err := printRevoked(&out, "json", q, r); err != nil {
		t.Fatal(err)
	}
	var back revokedJSON
	if err := json.Unmarshal(out.Bytes(), &back); err != nil || !back.DryRun || back.Count != 1001 || len(back.NotEnforcing) != 1 || back.Agents != 3 || back.MissingLogs == nil {
		t.Errorf("%v: %s", err, out.String())
	}
}
