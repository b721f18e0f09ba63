package client

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

func TestPacing(t *testing.T) {
	refused, err := status.New(codes.ResourceExhausted, "busy").WithDetails(
		&errdetails.ErrorInfo{Reason: "BUSY"}, &errdetails.RetryInfo{RetryDelay: durationpb.New(20 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	down, unknown := errors.New("connection refused"), status.Error(codes.Unimplemented, "unknown method Sync")
	for range 200 { // of random draws
		p := pacing{backoff: firstBackoff}
		step := func(what string, err error, lived, least, most time.Duration, says bool) {
			t.Helper()
			wait, say := p.after(err, lived)
			if wait < least || wait > most || (say != "") != says {
				t.Fatalf("%s: waits %s and says %q; want %s to %s, and to say something: %v", what, wait, say, least, most, says)
			}
		}
		step("first", down, 0, 250*time.Millisecond, 750*time.Millisecond, true)
		step("second", down, 0, 500*time.Millisecond, 1500*time.Millisecond, true)
		for range 10 {
			p.after(down, 0)
		}
		step("long down", down, 0, 30*time.Second, 90*time.Second, true)
		step("ended after long", down, time.Hour, 250*time.Millisecond, 750*time.Millisecond, true)
		step("refused", refusedBy(refused.Err()), 0, 20*time.Second, 22*time.Second, true)
		step("an older server", unknown, 0, 5*time.Minute, 15*time.Minute, true)
		step("still", unknown, 0, 5*time.Minute, 15*time.Minute, false)
		step("down again", down, time.Hour, 250*time.Millisecond, 750*time.Millisecond, true)
		step("older again", unknown, 0, 5*time.Minute, 15*time.Minute, true)
	}
}

// Answers overtake each other: one that is older only because its call began earlier is no rollback. One to a later call
// is.
func TestD21OvertakenCheckpointIsNoAlarm(t *testing.T) {
	secret, _, err := note.GenerateKey(rand.Reader, "log.test/one")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := note.NewSigner(secret)
	if err != nil {
		t.Fatal(err)
	}
	checkpoint := func(size int, root string) []string {
		sum := sha256.Sum256([]byte(root))
		text, err := note.Sign(&note.Note{Text: fmt.Sprintf("log.test/one\n%d\n%s\n", size, base64.StdEncoding.EncodeToString(sum[:]))}, signer)
		if err != nil {
			t.Fatal(err)
		}
		return []string{string(text)}
	}
	var log bytes.Buffer
	c := New(Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	early, stream := c.seen(), c.seen()
	c.seeCheckpoints(checkpoint(11, "b"), stream)
	c.seeCheckpoints(checkpoint(10, "a"), early) // overtaken
	c.seeCheckpoints(checkpoint(12, "c"), c.seen())
	c.seeCheckpoints(checkpoint(11, "b"), stream) // overtaken, and on its stream the same as before
	if log.Len() > 0 || c.Checkpoints()[0] != checkpoint(12, "c")[0] {
		t.Errorf("kept is %q; log: %s", c.Checkpoints(), &log)
	}
	c.seeCheckpoints(checkpoint(12, "other"), early)
	if !strings.Contains(log.String(), "root hash at size 12") {
		t.Errorf("another root at the same size, in an overtaken answer: %s", &log)
	}
	log.Reset()
	c.seeCheckpoints(checkpoint(11, "b"), c.seen())
	if !strings.Contains(log.String(), "it has 11 entries; 12 were there before") {
		t.Errorf("a call that began after 12 was seen: %s", &log)
	}
}

// D21: a server knows of other servers' logs what it was told some time ago: who comes from such a server has seen more. Of its own
// log it cannot know less, and what differs at one size differs wherever it comes from.
func TestD21CheckpointOfAnotherServersLog(t *testing.T) {
	checkpoint := func(log string, size int, root string) string {
		secret, _, err := note.GenerateKey(zeros{}, log)
		if err != nil {
			t.Fatal(err)
		}
		signer, err := note.NewSigner(secret)
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256([]byte(root))
		text, err := note.Sign(&note.Note{Text: fmt.Sprintf("%s\n%d\n%s\n", log, size, base64.StdEncoding.EncodeToString(sum[:]))}, signer)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	var log bytes.Buffer
	c := New(Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	c.seeCheckpoints([]string{checkpoint("a", 11, "x"), checkpoint("b", 7, "y")}, c.seen()) // at a
	atB := c.seen()
	c.seeCheckpoints([]string{checkpoint("b", 9, "z"), checkpoint("a", 10, "w")}, atB)
	c.seeCheckpoints([]string{checkpoint("b", 9, "z"), checkpoint("a", 11, "x")}, atB)
	c.seeCheckpoints([]string{checkpoint("a", 11, "x"), checkpoint("b", 8, "v")}, c.seen()) // at a again
	if log.Len() > 0 || len(c.Checkpoints()) != 2 || c.Checkpoints()[0] != checkpoint("a", 11, "x") || c.Checkpoints()[1] != checkpoint("b", 9, "z") {
		t.Errorf("kept is %q; log: %s", c.Checkpoints(), &log)
	}
	for _, tc := range []struct {
		texts []string
		want  string
	}{
		{[]string{checkpoint("a", 10, "w"), checkpoint("b", 9, "z")}, "it has 10 entries; 11 were there before"},
		{[]string{checkpoint("b", 9, "z"), checkpoint("a", 11, "other")}, "root hash at size 11"},
	} {
		log.Reset()
		if c.seeCheckpoints(tc.texts, c.seen()); !strings.Contains(log.String(), tc.want) {
			t.Errorf("the log says %q; want %q", log.String(), tc.want)
		}
	}
}

// zeros makes keys that are always the same.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Whatever a server calls a checkpoint makes an error or one that does not contradict itself.
func FuzzParseCheckpoint(f *testing.F) {
	root := base64.StdEncoding.EncodeToString(make([]byte, 32))
	for _, text := range []string{
		"log.test/one\n4\n" + root + "\n\n\u2014 log.test/one p03RzT8DFeUz\n", "log.test/one\n0\n" + root + "\nmore\n\n\u2014 other AAAAAAAA\n\u2014 log.test/one AAAAAAAA\n",
		"", "\n\n", "a\n-1\nb\n\n\u2014 a AAAAAAAA\n",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseCheckpoint(text)
		if err != nil {
			return
		}
		if kind, why := c.contradicts(c, true); kind != "" || c.text != text || c.size < 0 || c.origin == "" {
			t.Errorf("%q is read as %+v: %s %s", text, c, kind, why)
		}
	})
}
